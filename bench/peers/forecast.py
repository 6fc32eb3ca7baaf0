"""How long a run takes: by the usual times of another machine at first, then by what the turns took here.

Must not know: how anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.bench.peers.tasks import Task
from octavo.bench.peers.worker import Contender

USUAL_START_S = {"vLLM": 90.0}
START_S = 5.0
TURN_S = 10.0  # of an engine that the task says nothing of


class Forecast:
    """Seconds that are left. An engine's turns are taken to last so many times the usual as those that it has had."""

    def __init__(
        self, plan: Sequence[tuple[Task, Sequence[str]]], contenders: Mapping[str, Contender], *, rounds: int, again: Sequence[str] = ()
    ) -> None:
        self._starts = [name for name in (*contenders, *again) if name in contenders]
        self._turns = dict.fromkeys(contenders, 0.0)  # usual seconds of those to come
        self._usual, self._taken = dict.fromkeys(contenders, 0.0), dict.fromkeys(contenders, 0.0)  # of those that were
        for task, names in plan:
            for name in names:
                if name in contenders:
                    self._turns[name] += usual_turn(task, name) * (rounds + contenders[name].warmups)

    @property
    def left(self) -> float:
        """Seconds."""
        starts = sum(USUAL_START_S.get(name, START_S) for name in self._starts)
        return starts + sum(seconds * self._factor(name) for name, seconds in self._turns.items())

    def started(self, name: str) -> None:
        """One start of this engine is over."""
        if name in self._starts:
            self._starts.remove(name)

    def turned(self, name: str, usual: float, taken: float) -> None:
        """It took so many seconds for what usually takes so many."""
        self._turns[name] = max(0.0, self._turns[name] - usual)
        self._usual[name] += usual
        self._taken[name] += taken

    def dropped(self, name: str) -> None:
        """This engine has no more turns."""
        self._turns[name] = 0.0
        self._starts = [one for one in self._starts if one != name]

    def _factor(self, name: str) -> float:
        """Of one that had no turn yet: that of all others together."""
        if self._usual[name]:
            return self._taken[name] / self._usual[name]
        usual = sum(self._usual.values())
        return sum(self._taken.values()) / usual if usual else 1.0


def usual_turn(task: Task, name: str) -> float:
    """Seconds, of both timings where it is asked again."""
    return task.usual.get(name, TURN_S)


def about(seconds: float) -> str:
    """In words: "1 minute", "12 minutes"."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'s' * (minutes > 1)}"

"""Turns: each engine does a task while the others wait, in another order each round, and the next round begins when all are through.

An engine that fails takes no further part; what it would have been compared with says why.
Must not know: which engines there are, what should come out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import psutil
from tqdm import tqdm

from octavo.bench.peers.forecast import Forecast, about, usual_turn
from octavo.bench.peers.outcome import Outcome, compare_tokens
from octavo.bench.peers.tasks import Task
from octavo.bench.peers.worker import Contender, PeerError, Worker

FIRST = [[300 + i for i in range(16)]], [1]
"""Asked of each engine once it is loaded: its first token."""

SMALL = [[300 + i for i in range(16)], [320 + i for i in range(8)]], [4, 4]
"""Asked before its first turn of an engine whose turns are too long for one that does not count."""


class Turns:
    """The engines of one measurement; leaving the block ends their processes."""

    def __init__(
        self,
        outcome: Outcome,
        contenders: Mapping[str, Contender],
        *,
        logs: Path,
        new: Callable[[Contender, Path], Worker] = Worker,
        first: tuple[list[list[int]], list[int]] = FIRST,
    ) -> None:
        self.outcome = outcome
        self._contenders, self._logs, self._new, self._first = contenders, logs, new, first
        self._workers: dict[str, Worker] = {}
        self._forecast = Forecast([], contenders, rounds=0)
        self._begun = perf_counter()
        self._bar = tqdm(
            total=0.0, unit="s", desc="Measuring", disable=None, bar_format="{desc}: {percentage:.0f}%|{bar}| {remaining} left"
        )

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        for worker in self._workers.values():
            worker.close()

    def expect(self, forecast: Forecast) -> None:
        """How long all of it will take."""
        self._forecast = forecast
        self._show_left()

    def start(self, *, again: Collection[str] = ()) -> None:
        """One after another, each to its first token; those of `again` once more, and their first time does not count."""
        for name in self._contenders:
            if name in again:
                self._start(name, ", which does not count")
                if name not in self._workers:
                    continue
                self._workers.pop(name).close()
            self._start(name)

    def _start(self, name: str, note: str = "") -> None:
        outcome, threads = self.outcome, self.outcome.settings["threads"]
        outcome.starts.pop(name, None)
        with self._blaming(name):
            worker = self._workers[name] = self._new(self._contenders[name], self._logs / f"{name.replace(' ', '-')}.log")
            facts = outcome.facts[name] = worker.load()
            if facts["threads"] != threads:
                raise PeerError(f"{name} computes with {facts['threads']} threads, not with the {threads} that were asked for")
            worker.generate(*self._first)
            outcome.starts[name] = [worker.age]
            self._forecast.started(name)
            self._tell(f"{name}: first token {outcome.starts[name][0]:.1f} s after its start{note}")

    def run(self, task: Task, engines: Sequence[str], *, rounds: int, ours: str) -> None:
        """A task's turns. Tokens are compared with those of `ours`."""
        outcome = self.outcome
        outcome.digests[task.name] = task.work.digest
        for timing in task.timings:
            outcome.tokens[timing] = sum(task.lengths)
            outcome.seconds[timing] = {name: [] for name in engines if name in self._workers}
            outcome.answers[timing] = len(task.lengths)
        answers: dict[str, dict[str, list[list[int]]]] = {timing: {} for timing in task.timings}
        self._warm_up_a_little(engines)
        warmups = max((self._contenders[name].warmups for name in engines if name in self._workers), default=0)
        for number in range(-warmups, rounds):
            there = [name for name in engines if name in self._workers]
            for name in there if number % 2 == 0 else reversed(there):
                if number < -self._contenders[name].warmups:
                    continue
                with self._blaming(name):
                    self._workers[name].ask("forget")
                    for timing in task.timings:
                        with self._watching(name):
                            answer = self._workers[name].generate(task.prompts, task.lengths)
                        answers[timing][name] = answer["token_ids"]
                        if number >= 0:
                            outcome.seconds[timing][name].append(answer["seconds"])
                        which = f"round {number + 1} of {rounds}" if number >= 0 else "warm-up"
                        self._forecast.turned(name, usual_turn(task, name) / len(task.timings), answer["seconds"])
                        self._tell(f"{timing}, {which}: {name} {answer['seconds']:.2f} s")
            if number == 0 and (left := self._forecast.left):
                self._tell(f"Left, by what the turns took so far: about {about(left)}")
        for timing, by_engine in answers.items():
            if ours in by_engine:
                outcome.alike[timing] = {
                    name: compare_tokens(by_engine[ours], tokens) for name, tokens in by_engine.items() if name != ours
                }

    def _warm_up_a_little(self, engines: Sequence[str]) -> None:
        """Those that have no turn which does not count."""
        for name in engines:
            if name in self._workers and not self._contenders[name].warmups:
                with self._blaming(name):
                    self._workers[name].generate(*SMALL)

    def memory(self, engines: Sequence[str]) -> None:
        """What each process holds now, and the most since its last turn began."""
        for name in engines:
            if name in self._workers:
                with self._blaming(name):
                    self.outcome.memory[name] = self._workers[name].ask("memory")

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """A failure is this engine's, and its last."""
        try:
            yield
        except PeerError as error:
            self.outcome.problems[name] = str(error)
            self._forecast.dropped(name)
            self._tell(f"without {name} from now on: {error}")
            if worker := self._workers.pop(name, None):
                worker.close()

    @contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        """Who else uses the processor meanwhile."""
        before, busy, begun = self._cpu_seconds(), _busy_seconds(), perf_counter()
        yield
        spent, after = perf_counter() - begun, self._cpu_seconds()
        used = {one: after[one] - before[one] for one in before}
        for one, seconds in used.items():
            if one != name:
                self.outcome.idle[one] = max(self.outcome.idle.get(one, 0.0), seconds / spent)
        self.outcome.others.append(max(0.0, _busy_seconds() - busy - used[name]) / spent)

    def _cpu_seconds(self) -> dict[str, float]:
        return {name: worker.cpu_seconds() for name, worker in self._workers.items()}

    def _tell(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)
        self._show_left()

    def _show_left(self) -> None:
        spent = perf_counter() - self._begun
        self._bar.n, self._bar.total = spent, spent + self._forecast.left
        self._bar.refresh()


def _busy_seconds() -> float:
    """That all cores together have worked, or that another virtual machine had them."""
    times = psutil.cpu_times()
    busy = times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq", "steal"))
    return float(busy)

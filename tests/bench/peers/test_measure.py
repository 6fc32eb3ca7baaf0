"""Engines take turns in processes of their own; one that fails is left out, and says why. With stand-ins for engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.peers.measure import Turns, expected_seconds
from octavo.bench.peers.outcome import Outcome, compare_tokens
from octavo.bench.peers.tasks import Task, make_tasks
from octavo.bench.peers.worker import Contender, PeerError, Worker

HERE = Path(__file__).parent
FAST = 0.02


def stand_in(name: str, *, warmups: int = 1, **options: Any) -> Contender:
    return Contender(
        name=name,
        python=Path(sys.executable),
        module="stand_in",
        model=Path("nowhere"),
        options={"seconds": FAST} | options,
        environ={"OMP_NUM_THREADS": "3"},
        warmups=warmups,
        folder=HERE,
    )


def blank(**more: Any) -> Outcome:
    return Outcome(settings={"rows": [], "rounds": 2, "threads": 3, "seed": 0, "scale": 1}, identity={}, **more)


def small() -> dict[str, Task]:
    return make_tasks(384, scale=0.02)


def measured(*contenders: Contender, task: str = "one", rounds: int = 2, logs: Path, **waits: float) -> Outcome:
    """All of them do one task."""
    outcome, all_of_them = blank(), {one.name: one for one in contenders}
    with Turns(outcome, all_of_them, logs=logs, new=lambda contender, log: Worker(contender, log, **waits)) as turns:
        turns.start()
        turns.run(small()[task], list(all_of_them), rounds=rounds, ours="Octavo")
        turns.memory(list(all_of_them))
    return outcome


def test_turns_count_after_the_warm_up_and_change_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rounds of each in pairs; the first of one round is the last of the next; each one's own warm-ups."""
    outcome = measured(stand_in("Octavo"), stand_in("slow", seconds=5 * FAST, warmups=2), logs=tmp_path)
    assert outcome.problems == {}
    assert {name: len(seconds) for name, seconds in outcome.seconds["one"].items()} == {"Octavo": 2, "slow": 2}
    assert min(outcome.seconds["one"]["slow"]) >= 5 * FAST > FAST <= min(outcome.seconds["one"]["Octavo"])
    told = [line.partition(": ")[2].split()[0] for line in capsys.readouterr().err.splitlines() if line.startswith("one, ")]
    assert told == ["slow", "slow", "Octavo", "Octavo", "slow", "slow", "Octavo"]
    assert outcome.facts["slow"] == {"versions": {"stand-in": "1.0"}, "threads": 3, "stack": {"a": "b", "c": "d"}}
    assert outcome.starts["slow"][0] > 5 * FAST and outcome.tokens["one"] == 3
    assert outcome.alike["one"] == {"slow": (1.0, 1.0)}


def test_what_is_asked_again_is_a_timing_of_its_own(tmp_path: Path) -> None:
    """The first time after forgetting, the second with what was kept of it."""
    outcome = measured(stand_in("Octavo", seconds=4 * FAST), logs=tmp_path, task="prefix")
    cold, warm = outcome.seconds["prefix"]["Octavo"], outcome.seconds["prefix, again"]["Octavo"]
    assert len(cold) == len(warm) == 2 and min(cold) >= 4 * FAST and min(warm) >= 2 * FAST


def test_memory_beside_weights(tmp_path: Path) -> None:
    """Of a pool of 16 MiB the part counts that was written; peaks are not below what is there."""
    memory = measured(stand_in("Octavo"), logs=tmp_path).memory["Octavo"]
    assert 1 << 20 <= memory["kv"] < 1 << 23
    assert memory["kv"] < memory["resident"] <= memory["peak"] and memory["start_peak"] > 0


def test_who_waits_uses_no_processor(tmp_path: Path) -> None:
    """While another one works."""
    outcome = measured(stand_in("Octavo", seconds=0.3), stand_in("other", seconds=0.3), logs=tmp_path)
    assert max(outcome.idle.values()) < 0.1 and len(outcome.others) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ends_at": 3, "words": "out of luck"}, "broken ended with status 7: out of luck"),
        ({"hangs_at": 3}, "broken did not answer within 1 s and was ended"),
        ({"short": 1}, "broken: ValueError: prompt 0 has 0 tokens, not the 1 asked for"),
        ({"refuses": "no such option"}, "broken: ValueError: no such option"),
    ],
)
def test_an_engine_that_fails_is_left_out(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    """The others go on, and there is no figure of fewer rounds beside theirs that looks like one."""
    outcome = measured(stand_in("Octavo"), stand_in("broken", **options), logs=tmp_path, run_wait_s=1)
    assert outcome.problems == {"broken": said}
    assert len(outcome.seconds["one"]["Octavo"]) == 2 and len(outcome.seconds["one"].get("broken", [])) < 2


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    """Is said by its path."""
    contender = Contender(name="lost", python=tmp_path / "python", module="stand_in", model=tmp_path)
    with pytest.raises(PeerError, match="python does not run: No such file"):
        Worker(contender, tmp_path / "log")


def test_answers_beside_each_other() -> None:
    """Beginning alike, and how far."""
    assert compare_tokens([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [7, 6]]) == (0.5, 0.25)


def test_the_tasks_are_those_of_the_table() -> None:
    """Counts, lengths, and the same each time."""
    tasks = make_tasks(49152)
    mixed = tasks["mixed"]
    assert len(mixed.prompts) == 64 and min(map(len, mixed.prompts)) >= 16 and max(map(len, mixed.prompts)) <= 256
    assert min(mixed.lengths) >= 16 and max(mixed.lengths) <= 256 and len(set(mixed.lengths)) > 30
    assert [(len(one), length) for one, length in zip(tasks["eight"].prompts, tasks["eight"].lengths, strict=True)] == [(128, 128)] * 8
    assert (tasks["prompt"].longest, tasks["prompt"].lengths, tasks["one"].lengths) == (4001, [1], [128])
    prefix = tasks["prefix"]
    assert len(prefix.prompts) == 64 and len({tuple(one[:512]) for one in prefix.prompts}) == 1
    assert {len(one) for one in prefix.prompts} == {544} and len({tuple(one) for one in prefix.prompts}) == 64
    assert prefix.timings == ["prefix", "prefix, again"] and prefix.work.digest == make_tasks(49152)["prefix"].work.digest
    assert max(map(max, mixed.prompts)) < 49152


def test_a_run_is_short_enough() -> None:
    """All rows with five rounds in twenty minutes, on the machine that the times are of."""
    from octavo.bench.peers.claims import ROWS, engines_of

    tasks, names = make_tasks(49152), ["Octavo", "Octavo int8", "Octavo int4", "vLLM", "llama.cpp", "Hugging Face"]
    all_of_them = {name: stand_in(name, warmups={"vLLM": 2, "Hugging Face": 0}.get(name, 1)) for name in names}
    plan = [(tasks[task], engines) for task, engines in engines_of(ROWS).items()]
    assert 600 < expected_seconds(plan, all_of_them, rounds=5) < 1200
    assert all(name in task.usual for task, engines in plan for name in engines)

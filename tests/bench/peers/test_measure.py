"""Engines take turns in processes of their own; one that fails is left out, and says why. With stand-ins for engines."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.peers.forecast import Forecast
from octavo.bench.peers.measure import SMALL, Turns
from octavo.bench.peers.outcome import Outcome, compare_tokens
from octavo.bench.peers.tasks import Task, make_tasks
from octavo.bench.peers.worker import RUN_WAIT_S, Contender, PeerError, Worker, environment

HERE = Path(__file__).parent
FAST = 0.02


def stand_in(name: str, *, warmups: int = 1, threads: int = 3, run_wait_s: float = RUN_WAIT_S, **options: Any) -> Contender:
    return Contender(
        name=name,
        python=Path(sys.executable),
        module="stand_in",
        model=Path("nowhere"),
        options={"seconds": FAST} | options,
        environ={"OMP_NUM_THREADS": str(threads)},
        warmups=warmups,
        run_wait_s=run_wait_s,
        folder=HERE,
    )


class Listening(Worker):
    """Remembers what was asked: how many prompts, of which lengths, and by how much the first answer is off the first prompt."""

    heard: list[tuple[str, int, list[int], int]]

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        answer = super().generate(prompts, lengths)
        self.heard.append((self.contender.name, len(prompts), lengths, answer["token_ids"][0][0] - prompts[0][0]))
        return answer


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[int], int]]:
    """By all Listening of a test, in order."""
    monkeypatch.setattr(Listening, "heard", [], raising=False)
    return Listening.heard


def blank(**more: Any) -> Outcome:
    return Outcome(settings={"rows": [], "rounds": 2, "threads": 3, "seed": 0, "scale": 1}, identity={}, **more)


def small() -> dict[str, Task]:
    return make_tasks(384, scale=0.02)


def measured(*contenders: Contender, task: str = "one", rounds: int = 2, logs: Path, again: Collection[str] = ()) -> Outcome:
    """All of them do one task."""
    outcome, all_of_them = blank(), {one.name: one for one in contenders}
    with Turns(outcome, all_of_them, logs=logs, new=Listening) as turns:
        turns.start(again=again)
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


def test_what_is_asked_again_is_a_timing_of_its_own(tmp_path: Path, heard: list[tuple[str, int, list[int], int]]) -> None:
    """The first time after forgetting, the second out of what was kept of it: in the warm-up and in both rounds."""
    outcome = measured(stand_in("Octavo"), logs=tmp_path, task="prefix")
    assert [later for _, _, _, later in heard] == [0, *(0, 1000) * 3]  # the first of all is its first token
    assert len(outcome.seconds["prefix"]["Octavo"]) == len(outcome.seconds["prefix, again"]["Octavo"]) == 2
    assert outcome.answers == {"prefix": 1, "prefix, again": 1}


def test_who_has_no_warm_up_is_asked_something_small(tmp_path: Path, heard: list[tuple[str, int, list[int], int]]) -> None:
    """Two prompts of unlike lengths, once, and what was cached of them is forgotten."""
    outcome = measured(stand_in("Octavo"), stand_in("long", warmups=0), logs=tmp_path)
    lengths = small()["one"].lengths
    asked = [(number, lengths, later) for name, number, lengths, later in heard if name == "long"]
    assert asked == [(1, [1], 0), (2, [4, 4], 1000), (1, lengths, 0), (1, lengths, 0)]
    assert len(outcome.seconds["one"]["long"]) == 2 and max(map(max, SMALL[0])) < 384 and len(SMALL[0][0]) != len(SMALL[0][1])


def test_of_two_starts_the_second_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own each, and only for those that were named."""
    outcome = measured(stand_in("Octavo"), stand_in("cold"), logs=tmp_path, again=["cold", "not there"])
    told = [line for line in capsys.readouterr().err.splitlines() if "after its start" in line]
    assert [line.partition(":")[0] for line in told] == ["Octavo", "cold", "cold"]
    assert [line.endswith("which does not count") for line in told] == [False, True, False]
    assert f"{outcome.starts['cold'][0]:.1f} s" in told[2] and len(outcome.starts["cold"]) == 1
    broken = measured(stand_in("cold", ends_at=1, words="no room"), logs=tmp_path, again=["cold"])
    assert broken.problems == {"cold": "cold ended with status 7: no room"} and broken.starts == {}


def test_other_threads_than_asked_for_are_no_comparison(tmp_path: Path) -> None:
    """Whatever an engine takes its number of threads from."""
    outcome = measured(stand_in("Octavo"), stand_in("other", threads=2), logs=tmp_path)
    assert outcome.problems == {"other": "other computes with 2 threads, not with the 3 that were asked for"}
    assert outcome.seconds["one"].keys() == {"Octavo"} and "other" not in outcome.starts


def test_what_the_user_has_set_up_is_not_for_the_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of engines, of threads and of Python; the cache stays where it is. What lies about in the folder is not imported."""
    dropped = ("OCTAVO_SET_ENGINE__DTYPE", "OCTAVO_NATIVE_LEVEL", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "VLLM_USE_V1")
    for name in (*dropped, "PYTHONPATH"):
        monkeypatch.setenv(name, "of the user")
    monkeypatch.setenv("OCTAVO_HOME", "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise ImportError")
    facts = measured(stand_in("Octavo", tells=True), logs=tmp_path).facts["Octavo"]
    assert facts["folder"] == []
    assert facts["variables"]["OCTAVO_HOME"] == "cache" and facts["variables"]["OMP_NUM_THREADS"] == "3" and "PATH" in facts["variables"]
    assert not {*dropped, "PYTHONPATH"} & facts["variables"].keys()
    assert environment({"VLLM_B": "own"}, parent={"VLLM_A": "1", "HOME": "h"}) == {"VLLM_B": "own", "HOME": "h"}


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
    outcome = measured(stand_in("Octavo"), stand_in("broken", run_wait_s=1, **options), logs=tmp_path)
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
    assert 600 < Forecast(plan, all_of_them, rounds=5, again=["vLLM"]).left < 1200
    assert all(name in task.usual for task, engines in plan for name in engines)


def test_the_forecast_goes_by_what_turns_took() -> None:
    """An engine's own turns for its own; all there were for one that had none. One that is out takes no more time."""
    tasks, all_of_them = make_tasks(49152), {name: stand_in(name) for name in ("Octavo", "Hugging Face")}
    plan = [(tasks["mixed"], ["Octavo", "Hugging Face"])]
    forecast = Forecast(plan, all_of_them, rounds=1, again=["vLLM"])
    assert forecast.left == 2 * 5 + 2 * (14 + 67)
    forecast.started("Octavo")
    forecast.started("Hugging Face")
    forecast.turned("Octavo", 14, 28)
    assert forecast.left == 28 + 2 * 2 * 67
    forecast.turned("Hugging Face", 67, 670)
    assert forecast.left == 28 + 670
    forecast.dropped("Hugging Face")
    assert forecast.left == 28

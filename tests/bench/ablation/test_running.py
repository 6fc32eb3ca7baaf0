"""A whole ablation: what is run in which order, what is kept, and what happens when something goes wrong."""

from __future__ import annotations

import gc
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.ablation import running
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.result import AblationResult, run_folder
from octavo.bench.ablation.running import run_ablation
from octavo.bench.ablation.schedule import order
from octavo.bench.ablation.spec import AGAIN, AblationSpec
from octavo.bench.ablation.table import markdown
from octavo.bench.interrupts import RunFailed, RunInterrupted
from octavo.bench.records import RequestRecord
from octavo.bench.runs import Run
from octavo.core.errors import IncompatibleStackError, InvalidOptionsError, ResultError
from tests.bench.ablation.small import LADDER, registry, small_spec

SCENARIO = "lengths"


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines(registry(wrong=3.0))


@pytest.fixture(autouse=True)
def _the_reference_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: these runs take milliseconds."""
    monkeypatch.setattr(running, "REFERENCE_SHARE", math.inf)


def run(engines: Engines, spec: AblationSpec, folder: Path, *, resume: bool = False) -> AblationResult:
    return run_ablation(engines, spec, folder, resume=resume, told=lambda *told: None)


def test_the_order() -> None:
    """Each repeat begins with another cell, and every second one goes backwards."""
    assert [order("abc", repeat) for repeat in range(4)] == [["a", "b", "c"], ["a", "c", "b"], ["c", "a", "b"], ["c", "b", "a"]]
    assert {order("abcd", repeat)[0] for repeat in range(4)} == {"a", "c"}
    assert all(sorted(order("abcd", repeat)) == list("abcd") for repeat in range(8))


def test_an_ablation(engines: Engines, tmp_path: Path) -> None:
    """Every cell and the baseline again, in every repeat, with equal work within it and other work in the next; all the same tokens."""
    told: list[tuple[str, int, int]] = []
    result = run_ablation(engines, small_spec(), tmp_path, told=lambda *one: told.append(one))
    names = ["static", "continuous", "paged", "static (again)"]
    assert set(result.runs) == {(SCENARIO, name, repeat) for name in names for repeat in range(2)}
    digests = [{result.runs[SCENARIO, name, repeat].work.digest for name in names} for repeat in range(2)]
    assert len(digests[0]) == len(digests[1]) == 1 and digests[0] != digests[1]
    for run in result.runs.values():
        assert len(run.records) == 6 and all(record.succeeded for record in run.records)
        assert run.identity is not None and run.memory is not None and run.account.shares.total == pytest.approx(100)
        assert run.steps[0].start >= 0
    assert result.finished and result.tokens_agree and not result.broken
    exact = {name: outputs.exact for name, outputs in result.outputs[SCENARIO].items()}
    assert {name: (found.compared, found.equal) for name, found in exact.items() if found} == {
        "static": (12, 12),  # against the reference
        "continuous": (12, 12),
        "paged": (12, 12),
        "static (again)": (12, 12),
    }
    assert set(result.breakdowns[SCENARIO]) == {"static", "continuous", "paged"} and len(result.runs) == 8
    for breakdown in result.breakdowns[SCENARIO].values():
        assert breakdown.knows_linears and min(breakdown.forward.attention, breakdown.forward.linear, breakdown.forward.rest) > 0
        assert set(breakdown.roofline) == {"decode", "prompts"} and 0 < breakdown.roofline["decode"].share < 1
    assert result.failed_checks(of_time=False) == {}
    assert result.referenced == result.compared == {SCENARIO: [0, 1]}
    assert told[-1][1:] == (66, 66) and {total for _, _, total in told} == {0, 66}  # three cells are run once more, for the parts
    assert [over for _, over, _ in told] == sorted(over for _, over, _ in told)
    assert {over for text, over, _ in told if text.startswith(f"{SCENARIO}: the parts of paged's steps")} == set(range(60, 67))
    cells = {cell.name: cell for cell in result.cells[SCENARIO]}
    assert cells["paged"].change == "allocator: contiguous -> paged" and cells["static (again)"].parent == "static"
    assert {cell.pool_slots for cell in cells.values()} == {128}


@pytest.mark.parametrize(("share", "repeats", "said"), [(0.0, [0], "repeat 1 of 3"), (math.inf, [0, 1, 2], "repeat 1, 2, 3 of 3")])
def test_a_baseline_is_put_to_the_reference_again(
    share: float, repeats: list[int], said: str, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each repeat, unless that takes too large a share of the runs' time; the table says in which it was."""
    monkeypatch.setattr(running, "REFERENCE_SHARE", share)
    result = run(engines, small_spec({"one": {}}, repeats=3), tmp_path)
    exact = result.outputs[SCENARIO]["one"].exact
    assert exact is not None and exact.compared == exact.equal == 6 * len(repeats)
    assert result.compared == {SCENARIO: [0, 1, 2]} and result.referenced == {SCENARIO: repeats}
    assert f"* one against the fp32 reference ({said}): fp32: {6 * len(repeats)}/{6 * len(repeats)} the same" in markdown(result)
    assert AblationResult.load(tmp_path).referenced == result.referenced


def test_a_baseline_that_is_wrong_in_a_later_repeat_is_seen(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all cells that stand on it are wrong alike."""
    real = running.drive

    def wrong_later(engine: Any, work: Any, **how: Any) -> Any:
        records = real(engine, work, **how)
        if work.seed == 1:
            for one in records:
                one.token_ids[0] = (one.token_ids[0] + 1) % 384
        return records

    monkeypatch.setattr(running, "drive", wrong_later)
    cells = {
        "one": {"settings": {"allocator": "paged", "scheduler": "continuous"}},
        "two": {"parent": "one", "settings": {"scheduler": {"plugin": "chunked"}}},
    }
    result = run(engines, small_spec(cells), tmp_path)
    assert not result.tokens_agree and not result.holds(SCENARIO, "two")
    exact = result.outputs[SCENARIO]["one"].exact
    assert exact is not None and {one.seed for one in exact.divergences} == {1}


def test_a_result_of_before(engines: Engines, tmp_path: Path) -> None:
    """That does not say when its baselines were put to the reference: they were in the first repeat."""
    run(engines, small_spec({"one": {}}, repeats=2), tmp_path)
    path = tmp_path / "ablation.json"
    content = json.loads(path.read_text())
    del content["referenced"]
    path.write_text(json.dumps(content))
    again = AblationResult.load(tmp_path)
    assert again.referenced == {SCENARIO: [0]} and "against the fp32 reference (repeat 1 of 2)" in markdown(again)


def test_what_is_kept_is_what_was_found(engines: Engines, tmp_path: Path) -> None:
    """Loaded again, the folder says the same."""
    result = run(engines, small_spec(compared=("output tok/s", "TTFT p99")), tmp_path)
    again = AblationResult.load(tmp_path)
    assert (again.spec, again.cells, again.outputs, again.finished) == (result.spec, result.cells, result.outputs, True)
    assert again.breakdowns == result.breakdowns
    assert again.comparisons(SCENARIO) == result.comparisons(SCENARIO) and len(again.comparisons(SCENARIO)) == 6
    assert again.runs.keys() == result.runs.keys()


def test_no_cache_is_left_by_the_run_before(engines: Engines, tmp_path: Path) -> None:
    """Not by the warm-up either: the same prompts as in the repeat before are not found (fault 45)."""
    cells = {"prefix": {"settings": {"scheduler": "continuous", "allocator": "prefix"}}}
    workload = {"kind": "random", "count": 3, "input_len": 4, "prefix_len": 40, "output_len": 2}
    given = small_spec(cells, scenarios={SCENARIO: {"workload": workload, "load": {"concurrency": 1}}})
    result = run(engines, given, tmp_path)
    for found in result.runs.values():
        assert [record.num_cached_tokens for record in found.records] == [0, 32, 32]
        assert found.account.prefix.hit_tokens == 64 and found.account.prefix.queried_tokens == 3 * 44


def test_garbage_is_not_collected_meanwhile(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector is off while a run is timed, and on again."""
    seen: list[bool] = []
    real = running.drive

    def watched(*args: Any, **named: Any) -> Any:
        seen.append(gc.isenabled())
        return real(*args, **named)

    monkeypatch.setattr(running, "drive", watched)
    run(engines, small_spec({"one": {}}, repeats=1, warmup=0), tmp_path)
    assert seen == [False, False] and gc.isenabled()


def test_other_tokens_end_it(engines: Engines, tmp_path: Path) -> None:
    """After the first repeat; the wrong cell and those that stand on it have no ratio, the others do."""
    cells = LADDER | {
        "wrong": {"parent": "paged", "settings": {"kernel": {"plugin": "wrong"}}},
        "on wrong": {"parent": "wrong", "settings": {"scheduler": {"plugin": "chunked"}}},
    }
    cells["static"] = cells["static"] | {"settings": {"kernel": "sdpa"}}
    result = run(engines, small_spec(cells, repeats=3), tmp_path)
    assert not result.finished and not result.tokens_agree
    assert {repeat for _, _, repeat in result.runs} == {0}
    exact = result.outputs[SCENARIO]["wrong"].exact
    assert exact is not None and not exact.holds and all(not one.is_tie for one in exact.divergences)
    problems = {one.cell: one.problem for one in result.comparisons(SCENARIO)}
    assert problems["wrong"] == problems["on wrong"] == "its tokens are not the parent's"
    assert problems["paged"] == problems["continuous"] == ""


def test_refused_requests_make_the_comparison_incomplete(engines: Engines, tmp_path: Path) -> None:
    """All repeats run, but a cell that refuses what its parent answers has no ratio, nor one that stands on it; and its number is said."""
    limits = {"max_running": 1, "max_queue": 1}
    cells = {
        "all": {"settings": {"scheduler": "continuous", "allocator": "paged"}},
        "few": {"parent": "all", "settings": {"scheduler": {"classes": {"default": limits}}}},
        "on few": {"parent": "few", "settings": {"allocator": {"plugin": "prefix"}}},
    }
    result = run(engines, small_spec(cells), tmp_path)
    refused = sum(not record.succeeded for run in result.of(SCENARIO, "few") for record in run.records)
    assert refused > 0 and result.finished and result.tokens_agree and not result.tokens_hold
    exact = result.outputs[SCENARIO]["few"].exact
    assert exact is not None and (exact.lost, exact.parent_lost, exact.divergences) == (refused, 0, ())
    problems = {one.cell: one.problem for one in result.comparisons(SCENARIO)}
    lost = f"tokens cannot be compared: {refused} requests failed here and not by the parent"
    assert problems == {"few": lost, "on few": lost, f"all{AGAIN}": ""}
    assert markdown(result).count("INCOMPLETE") == 1 and not result.holds(SCENARIO, "few")


def test_a_wrong_baseline_is_seen(engines: Engines, tmp_path: Path) -> None:
    """It has no parent, but the reference; cells that agree with it are no better."""
    cells = {
        "wrong": {"settings": {"kernel": {"plugin": "wrong"}, "scheduler": "continuous", "allocator": "paged"}},
        "as wrong": {"parent": "wrong", "settings": {"scheduler": {"plugin": "chunked"}}},
    }
    result = run(engines, small_spec(cells, repeats=1), tmp_path)
    assert not result.outputs[SCENARIO]["wrong"].hold and not result.holds(SCENARIO, "as wrong")


class Interrupted:
    """`drive` that is interrupted at its n-th call, or breaks in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
        self.calls = 0
        real = running.drive

        def drive(*args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == call:
                raise error
            return real(*args, **named)

        monkeypatch.setattr(running, "drive", drive)


def test_ctrl_c_keeps_what_is_done_and_resuming_goes_on(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole runs are kept, the rest is run later, and nothing twice."""
    with monkeypatch.context() as patch:
        Interrupted(patch, 6, RunInterrupted([]))  # each run is one call: nothing is warmed up
        result = run(engines, small_spec(warmup=0), tmp_path)
    assert not result.finished and len(result.runs) == 5
    before = {key: run.records for key, run in AblationResult.load(tmp_path).runs.items()}
    with monkeypatch.context() as patch:
        counted = Interrupted(patch, 0, RunInterrupted([]))
        resumed = run(engines, result.spec, tmp_path, resume=True)
        assert counted.calls == 3
    assert resumed.finished and resumed.tokens_agree and len(resumed.runs) == 8
    assert {key: resumed.runs[key].records for key in before} == before


def test_ctrl_c_while_resuming_keeps_what_was_compared(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until as much is compared again: on the disk too."""
    before = run(engines, small_spec(), tmp_path)

    def interrupted(*args: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    for call in ("check", "check_again"):
        with monkeypatch.context() as patch:
            patch.setattr(running.Verifier, call, interrupted)
            result = run(engines, before.spec, tmp_path, resume=True)
        for found in (result, AblationResult.load(tmp_path)):
            assert not found.finished and (found.outputs, found.compared) == (before.outputs, {SCENARIO: [0, 1]})
            assert found.comparisons(SCENARIO) == before.comparisons(SCENARIO)


def test_a_repeat_counts_once_its_tokens_are_compared(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a repeat that was interrupted before are kept, and in no ratio."""
    Interrupted(monkeypatch, 8, RunInterrupted([]))
    result = run(engines, small_spec(warmup=0), tmp_path)
    assert len(result.runs) == 7 and result.compared == {SCENARIO: [0]}
    for found in (result, AblationResult.load(tmp_path)):
        assert {one.cell: one.interval.high for one in found.comparisons(SCENARIO) if one.interval} == dict.fromkeys(
            ("continuous", "paged", "static (again)"), math.inf
        )


def test_what_is_resumed_goes_on_with_the_same(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other versions or another device would not be comparable."""
    result = run(engines, small_spec({"one": {}}, repeats=1), tmp_path)
    key = (SCENARIO, "one", 0)
    header = run_folder(tmp_path, key) / "run.json"
    header.write_text(header.read_text().replace('"threads": ', '"threads": 7'))
    with pytest.raises(ResultError, match=r"was begun with something else, and cannot go on here: threads: 7\d+ then"):
        run(engines, result.spec, tmp_path, resume=True)


def test_a_run_that_breaks_is_listed(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; the cell that broke in one repeat has no ratio, nor has one that is compared with it."""
    Interrupted(monkeypatch, 2, RuntimeError("the device is on fire"))
    result = run(engines, small_spec(warmup=0), tmp_path)
    assert result.broken == {f"{SCENARIO}/continuous/0": "RuntimeError: the device is on fire"}
    assert result.finished and len(result.runs) == 7 and AblationResult.load(tmp_path).broken == result.broken
    found = {one.cell: (one.interval is not None, one.problem) for one in result.comparisons(SCENARIO)}
    broke = (False, "1 repeat of continuous broke")
    assert found == {"continuous": broke, "paged": broke, "static (again)": (True, "")}
    with monkeypatch.context() as patch:
        counted = Interrupted(patch, 0, RuntimeError())
        resumed = run(engines, result.spec, tmp_path, resume=True)  # it is tried again
    assert counted.calls == 1 and not resumed.broken and all(one.interval is not None for one in resumed.comparisons(SCENARIO))


def test_what_stands_on_a_run_that_breaks_is_not_compared(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far below: in that repeat there is nothing to compare it by that was compared itself. In the others it is."""
    Interrupted(monkeypatch, 2, RuntimeError("the device is on fire"))
    cells = LADDER | {"chunked": {"parent": "paged", "settings": {"scheduler": {"plugin": "chunked"}}}}
    result = run(engines, small_spec(cells, warmup=0), tmp_path)
    assert set(result.broken) == {f"{SCENARIO}/continuous/0"} and result.finished and len(result.runs) == 9
    counts = {name: outputs.exact.compared for name, outputs in result.outputs[SCENARIO].items() if outputs.exact}
    assert counts == {"static": 12, "continuous": 6, "paged": 6, "chunked": 6, f"static{AGAIN}": 12}


def test_a_run_that_its_engine_ends_is_kept_as_far_as_it_came(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the runs that count, with what failed; and it is run again when the ablation is resumed."""
    key = (SCENARIO, "continuous", 0)
    missed = RequestRecord(index=0, num_prompt_tokens=1, max_tokens=1, due=0.0, sent=0.0, ended=1.0, finish_reason="error", error="no")
    with monkeypatch.context() as patch:
        Interrupted(patch, 2, RunFailed([missed], RuntimeError("the device is on fire")))
        result = run(engines, small_spec(warmup=0), tmp_path)
    assert result.broken == {f"{SCENARIO}/continuous/0": "RuntimeError: the device is on fire"} and key not in result.runs
    kept = Run.load(run_folder(tmp_path, key, among="broken"))
    assert (kept.complete, kept.failed, kept.stopped_by) == (False, True, "RuntimeError: the device is on fire")
    assert kept.records == [missed] and key not in AblationResult.load(tmp_path).runs
    resumed = run(engines, result.spec, tmp_path, resume=True)
    assert resumed.broken == {} and key in resumed.runs and not run_folder(tmp_path, key, among="broken").exists()


def test_cells_that_do_not_run_here(engines: Engines, tmp_path: Path) -> None:
    """Optional ones are left out with the reason, and what stands on them; others end it before anything is measured."""
    triton = {"parent": "paged", "settings": {"kernel": {"plugin": "naive"}, "engine": {"kv_dtype": "bfloat16"}}}
    with pytest.raises(InvalidOptionsError, match="in 2 parts"):
        run(engines, small_spec(LADDER | {"other": triton}), tmp_path)
    other = {"parent": "paged", "settings": {"engine": {"kv_dtype": "bfloat16"}}}
    with pytest.raises(IncompatibleStackError, match="This stack cannot run"):
        run(engines, small_spec(LADDER | {"other": other}), tmp_path)
    cells = LADDER | {
        "other": other | {"optional": True},
        "on other": {"parent": "other", "settings": {"allocator": {"block_size": 4}}},
    }
    result = run(engines, small_spec(cells, repeats=1), tmp_path)
    reasons = {cell.name: cell.left_out for cell in result.cells[SCENARIO] if cell.left_out}
    assert "keeps KV in the model's dtype" in reasons["other"] and reasons["on other"] == "its parent 'other' is left out"
    assert result.finished and result.tokens_agree


def test_pools_must_be_equal(engines: Engines, tmp_path: Path) -> None:
    """In bytes, whatever the slots (fault 48)."""
    cells = {"one": {"settings": {"allocator": "paged"}}, "half": {"parent": "one", "settings": {"engine": {"dtype": "bfloat16"}}}}
    with pytest.raises(InvalidOptionsError, match=r"cells.half: its KV pool has \d+ bytes, that of 'one' \d+: pools must be equal"):
        run(engines, small_spec(cells), tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"compared": ("tok/s",)}, "compared: 'tok/s' is no measure"),
        ({"scenarios": {"a": {"workload": {"kind": "randon"}}}}, "scenarios.a.workload: there is no workload 'randon'"),
        ({"scenarios": {"a": {"workload": {"kind": "random", "length": 3}}}}, "scenarios.a.workload: random.length: Extra inputs"),
    ],
)
def test_mistakes_are_found_before_anything_runs(engines: Engines, tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    """In measures and workloads, as in everything else."""
    with pytest.raises(InvalidOptionsError, match=expected):
        run(engines, small_spec(**fields), tmp_path)


def test_sixteen_bits(tmp_path: Path) -> None:
    """A run in bf16 is compared in fp32, and its own tokens of each repeat with the reference as the naive kernel's are."""
    cells = {
        "paged": {"settings": {"scheduler": "continuous", "allocator": "paged", "kernel": "naive"}},
        "sdpa": {"parent": "paged", "settings": {"kernel": {"plugin": "sdpa"}}},
    }
    given = small_spec(cells, engine={"dtype": "bfloat16"})
    result = run(Engines(registry()), given, tmp_path)
    for name in ("paged", "sdpa", "paged (again)"):
        outputs = result.outputs[SCENARIO][name]
        assert outputs.exact is not None and outputs.exact.holds and outputs.exact.compared == 6
        assert outputs.lossy is not None and outputs.lossy.rounding.tokens > 10 and outputs.lossy.naive.tokens > 10
        assert outputs.lossy.perplexity > 1 and outputs.lossy.answers == 12  # of both repeats
        assert outputs.lossy.naive.tokens == outputs.lossy.rounding.tokens
    again = result.outputs[SCENARIO]["paged (again)"].lossy
    assert again is not None and again.holds and again.same_answers == 12 and again.perplexity == again.parent_perplexity


def test_sixteen_bits_that_are_too_wrong(tmp_path: Path) -> None:
    """A kernel that is right in fp32 only as far as its own noise, and farther off in bf16 than the naive one, has no speed."""
    cells = {
        "naive": {"settings": {"scheduler": "continuous", "allocator": "paged", "kernel": "naive"}},
        "wrong": {"parent": "naive", "settings": {"kernel": {"plugin": "wrong"}}},
    }
    result = run(Engines(registry(wrong=3.0)), small_spec(cells, engine={"dtype": "bfloat16"}, repeats=1), tmp_path)
    lossy = result.outputs[SCENARIO]["wrong"].lossy
    assert lossy is not None and not lossy.holds and not result.tokens_agree


def test_ops_that_are_wrong_in_sixteen_bits_only(tmp_path: Path) -> None:
    """They are not what they are held against: what is right in fp32 and rounds too much in bf16 has no speed, though all cells have it."""
    cells = {
        "rough": {"settings": {"scheduler": "continuous", "allocator": "paged", "kernel": "naive", "ops": "rough"}},
        "as rough": {"parent": "rough", "settings": {"scheduler": {"plugin": "chunked"}}},
    }
    result = run(Engines(registry()), small_spec(cells, engine={"dtype": "bfloat16"}, repeats=1), tmp_path)
    for name in cells:
        outputs = result.outputs[SCENARIO][name]
        assert outputs.exact is not None and outputs.exact.holds
        assert outputs.lossy is not None and not outputs.lossy.holds and not result.holds(SCENARIO, name)


def test_sixteen_bits_beside_their_parent_in_fp32(tmp_path: Path) -> None:
    """In as many bytes of KV, which are twice as many slots. Its tokens are its parent's in fp32, and how good those are that it gave in 16
    bits stands beside how fast they came."""
    cells = {
        "whole": {"settings": {"scheduler": "continuous", "allocator": "paged", "kernel": "naive", "ops": "torch"}},
        "half": {"parent": "whole", "settings": {"engine": {"dtype": "bfloat16"}}},
    }
    engine = {"max_model_len": 64, "kv_cache_memory": 128 * 512, "dtype": "float32", "device": "cpu"}
    result = run(Engines(registry()), small_spec(cells, settings={"engine": engine, "scheduler": {"max_num_seqs": 4}}), tmp_path)
    assert {cell.name: cell.pool_slots for cell in result.cells[SCENARIO]} == {"whole": 128, "half": 256, "whole (again)": 128}
    assert len({cell.pool_bytes for cell in result.cells[SCENARIO]}) == 1
    outputs = result.outputs[SCENARIO]["half"]
    assert outputs.exact is not None and outputs.exact.holds and outputs.exact.compared == 6
    assert outputs.lossy is not None and outputs.lossy.holds and outputs.lossy.answers == 12
    assert result.outputs[SCENARIO]["whole"].lossy is None
    text = markdown(result)
    slots = "whole: 128 slots, half: 256 slots, whole (again): 128 slots"
    assert f"Every cell has a KV pool of 0.000 GiB ({slots}) and max_model_len 64." in text
    lines = [line for line in text.splitlines() if re.match(r"\| (cell|half) ", line)]
    heads, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = dict(zip(heads, rows[0], strict=True))
    rounding = outputs.lossy.rounding
    assert found["agreement"] == f"{100 * (1 - rounding.rate):.2f} %" and float(found["tok/s"]) > 0
    assert found["perplexity (parent's)"] == f"{outputs.lossy.perplexity:.3f} ({outputs.lossy.parent_perplexity:.3f})"
    (ratio,) = [one for one in result.comparisons(SCENARIO) if one.cell == "half"]
    assert ratio.interval is not None and f"| {ratio.interval} " in text


def test_quantised_weights(engines: Engines, tmp_path: Path) -> None:
    """They have other tokens than whole ones: these are put to the reference with whole weights, and agreement and perplexity stand beside
    the ratio. What is as quantised as its parent is compared with it token by token."""
    cells = {
        "whole": {"settings": {"scheduler": "continuous", "allocator": "paged", "kernel": "naive"}},
        "int8": {"parent": "whole", "settings": {"model": {"plugin": "llama", "quantization": "int8"}}},
        "on int8": {"parent": "int8", "settings": {"kernel": {"plugin": "sdpa"}}},
        "int4": {"parent": "int8", "settings": {"model": {"quantization": "int4"}}},
        "also int4": {"settings": {"kernel": "naive", "model": {"plugin": "llama", "quantization": "int4"}}},
    }
    result = run(engines, small_spec(cells), tmp_path)
    found = result.outputs[SCENARIO]
    assert result.finished and result.tokens_hold
    for name in ("int8", "int4"):
        exact, lossy = found[name].exact, found[name].lossy
        assert exact is None and lossy is not None and lossy.holds and lossy.answers == 12 and lossy.what == f"{name} weights"
        assert lossy.perplexity > 1 and lossy.perplexity != lossy.parent_perplexity
    assert found["int4"].lossy is not None and found["int4"].lossy.rounding.off > 0
    for name in ("whole", "on int8", "also int4"):  # the baseline of int4 by a reference in int4
        exact = found[name].exact
        assert found[name].lossy is None and exact is not None and exact.holds and exact.compared == 12
    assert {one.cell: one.interval is not None for one in result.comparisons(SCENARIO)}["int8"]
    text = markdown(AblationResult.load(tmp_path))
    assert "* int8 against whole: int8 weights: " in text and "change" in text and "quantization=int8" in text


def test_quantised_weights_that_are_computed_wrong(engines: Engines, tmp_path: Path) -> None:
    """By a kernel or by ops, they are farther from whole ones than quantising explains."""
    cells = {
        "whole": {"settings": {"scheduler": "continuous", "allocator": "paged", "kernel": "wrong"}},
        "int8": {"parent": "whole", "settings": {"model": {"plugin": "llama", "quantization": "int8"}}},
    }
    lossy = run(engines, small_spec(cells, repeats=1), tmp_path).outputs[SCENARIO]["int8"].lossy
    assert lossy is not None and lossy.naive.tokens and not lossy.holds


def test_parts_that_cannot_be_told_are_no_failure_of_the_rest(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run with timers breaks: it is listed, and the ratios stay."""

    def broken(*args: Any, **named: Any) -> Any:
        raise TypeError("no model")

    monkeypatch.setattr(running, "break_down", broken)
    result = run(engines, small_spec({"one": {}}, repeats=1), tmp_path)
    assert result.broken == {f"{SCENARIO}/one/parts": "TypeError: no model"} and result.finished and len(result.runs) == 2
    monkeypatch.undo()
    again = run(engines, result.spec, tmp_path, resume=True)
    assert again.broken == {} and set(again.breakdowns[SCENARIO]) == {"one"}  # and it is tried again

"""An old result against a new one: what is slower, what is refused by name, and what noise hides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import figures as module
from octavo.bench.compare import SAME, compare
from octavo.bench.figures import KEPT, MEASURES, CellFigures, Figures, of_ablation, of_runs, read_figures
from octavo.bench.identity import Identity
from octavo.bench.runs import Run
from octavo.core.errors import ResultError
from tests.bench.ablation.made import AGAIN, OTHER, made_run, record, twice_as_fast
from tests.bench.measured import timed

IDENTITY = Identity(
    date="2026-01-01T00:00:00+00:00", versions={"octavo": "0.1.0", "torch": "2.13.0"}, model="m", model_origin="", model_revision="abc",
    dtype="float32", kv_dtype="float32", max_model_len=512, stack={"scheduler": "chunked"}, options={}, config_hash="c", pool_slots=100,
    pool_bytes=1, workload="w", workload_seed=0, workload_hash="h", device="cpu", driver="", cpu="EPYC", cores=2, threads=2, memory=1,
)  # fmt: skip
STEADY = (1.0, 1.01, 0.99, 1.0, 1.005)


def cell(factor: float = 1.0, *, identity: Identity = IDENTITY, values: Sequence[float] = STEADY, **fields: Any) -> CellFigures:
    """Rates of 100, latencies of 0.1 s; all `factor` times as slow."""
    rates = {name: [100 / (factor * value) if "tok/s" in name else 0.1 * factor * value for value in values] for name in MEASURES}
    known: dict[str, Any] = {"workloads": [f"w{n}" for n in range(len(values))], "failed": [0] * len(values), "values": rates}
    return CellFigures(identity=identity, **(known | fields))


def figures(factor: float = 1.0, **options: Any) -> Figures:
    return Figures(cells={"s/base": cell(factor, **options)})


def found(old: Figures, new: Figures, **options: Any) -> dict[str, str]:
    """The verdict by measure."""
    return {one.measure: one.found for one in compare(old, new, **options).changes}


def test_slower_faster_or_neither() -> None:
    """In every measure the right way round; the same result against itself is not slower."""
    assert found(figures(), figures(1.2)) == dict.fromkeys(MEASURES, "slower")
    assert found(figures(), figures(0.8)) == dict.fromkeys(MEASURES, "faster")
    assert found(figures(), figures()) == dict.fromkeys(MEASURES, "not slower")
    assert compare(figures(), figures(1.2)).regressed and not compare(figures(), figures(0.8)).regressed


def test_the_tolerance() -> None:
    """4 % slower is within the usual 5 %, and beyond 1 %."""
    assert set(found(figures(), figures(1.04)).values()) == {"not slower"}
    assert set(found(figures(), figures(1.04), tolerance=0.01).values()) == {"slower"}


def test_noise_hides_a_difference() -> None:
    """Where repeats spread widely nothing can be said, nor after one."""
    noisy = figures(1.2, values=(0.6, 1.7, 0.8, 1.9, 1.0))
    assert compare(figures(), noisy).says_nothing
    assert compare(figures(values=(1.0,)), figures(1.5, values=(1.0,))).says_nothing


def test_a_baseline_that_differs_from_itself_hides_a_difference() -> None:
    """A tenth of noise beside itself, in either result: 8 % slower is then not slower for sure, 30 % is."""
    floor = {f"s/base{AGAIN}": cell(1.1)}
    assert set(found(figures(), Figures(cells={**figures(1.08).cells, f"s/base{AGAIN}": cell(1.19)})).values()) == {"too noisy to say"}
    assert set(found(Figures(cells={**figures().cells, **floor}), figures(1.3)).values()) == {"slower"}
    assert set(found(figures(), figures(1.08)).values()) == {"slower"}


@pytest.mark.parametrize("name", SAME)
def test_what_must_be_the_same(name: str) -> None:
    """Another revision, context, device and so on is refused, with both values."""
    was = getattr(IDENTITY, name)
    now: Any = {"scheduler": "static"} if isinstance(was, dict) else was + 1 if isinstance(was, int) else f"other-{was}"
    said = ("static", "chunked") if isinstance(was, dict) else (repr(now), repr(was))
    with pytest.raises(ResultError, match=rf"s/base: {name} is {said[0]}, was {said[1]}"):
        compare(figures(), figures(identity=replace(IDENTITY, **{name: now})))


def test_versions_may_differ() -> None:
    """That is what a comparison is for; it is said."""
    newer = replace(IDENTITY, versions={"octavo": "0.2.0", "torch": "2.13.0"}, config_hash="d", options={"scheduler": {"new": 1}})
    assert compare(figures(), figures(identity=newer)).notes[0] == "octavo 0.2.0, was 0.1.0"


def test_limits_and_load_must_be_the_same() -> None:
    """Another option or another load is refused by name, however it was written; what is not said of an old result is a note."""
    few, many = (replace(IDENTITY, options={"scheduler": {"max_num_seqs": count}, "engine": {"dtype": "auto"}}) for count in (4, 64))
    with pytest.raises(ResultError, match=r"s/base: option scheduler.max_num_seqs is 64, was 4"):
        compare(figures(identity=few), figures(identity=many))
    said = replace(few, options={**few.options, "engine": {"dtype": "float32"}})  # as it came to be, it is the same
    assert set(found(figures(identity=few), figures(identity=said)).values()) == {"not slower"}
    with pytest.raises(ResultError, match=r"the load's concurrency is 1, was 8"):
        compare(figures(load={"concurrency": 8}), figures(load={"concurrency": 1}))
    with pytest.raises(ResultError, match=r"the load's rate is 2.0, was None"):
        compare(figures(load={"burstiness": 1.0}), figures(load={"burstiness": 1.0, "rate": 2.0}))
    notes = compare(figures(), figures(load={"concurrency": 1}, identity=few)).notes
    assert any("does not say its load" in note for note in notes) and any("scheduler.max_num_seqs is 4, which the old" in n for n in notes)


def test_repeats_of_the_same_work_all_count() -> None:
    """Five runs with one seed are five repeats: paired in their order, and none lost; failures are counted over the pairs."""
    same: dict[str, Any] = {"workloads": ["w"] * 5}
    noisy = (0.6, 1.7, 0.8, 1.9, 1.0)
    assert set(found(figures(**same), figures(1.2, **same)).values()) == {"slower"}
    assert set(found(figures(**same), figures(values=noisy, **same)).values()) == {"too noisy to say"}
    longer = figures(values=(*STEADY, 1.0), failed=[0, 0, 0, 0, 0, 3])  # the sixth has no partner
    assert not compare(figures(), longer).regressed


def test_a_cell_of_which_nothing_can_be_said() -> None:
    """It is not made good by another that is steady."""
    both = Figures(cells={"s/base": cell(), "s/more": cell()})
    hidden = Figures(cells={"s/base": cell(), "s/more": cell(values=(0.6, 1.7, 0.8, 1.9, 1.0))})
    assert compare(both, hidden).says_nothing and not compare(both, both).says_nothing


def test_work_is_paired_by_its_hash() -> None:
    """Other work is refused; of common work alone the ratio is made, whatever else was measured."""
    with pytest.raises(ResultError, match="no repeat has the same work"):
        compare(figures(), figures(workloads=[f"v{n}" for n in range(5)]))
    shifted = figures(values=(9.0, *STEADY), workloads=["v", *(f"w{n}" for n in range(5))])
    assert set(found(figures(), shifted).values()) == {"not slower"}


def test_a_lost_cell_is_refused_and_a_further_one_is_not() -> None:
    """Whatever the old result has must be there."""
    more = Figures(cells={"s/base": cell(), "s/more": cell()})
    assert found(figures(), more)
    with pytest.raises(ResultError, match="the new result lacks s/more"):
        compare(more, figures())


def test_failures_and_other_tokens_are_regressions() -> None:
    """However fast it is."""
    failing = compare(figures(), figures(0.5, failed=[0, 0, 2, 0, 0]))
    assert failing.regressed and failing.changes[0].problem == "2 requests failed, 0 did"
    assert compare(figures(), figures(0.5, tokens_hold=False)).regressed


def test_a_result_that_contradicts_itself_is_refused() -> None:
    """What it says is nothing. Times that do not add up are for who asks to judge."""
    with pytest.raises(ResultError, match=r"the new result fails a self-check.*pool, and 1 more"):
        compare(figures(), replace(figures(), problems=["pool", "tokens"]))
    assert not compare(replace(figures(), doubts=["busy"]), figures()).regressed


def with_identity(run: Run, seed: int) -> Run:
    run.work = replace(run.work, seed=seed)
    run.identity = replace(IDENTITY, pool_slots=run.account.capacity)
    return run


def test_figures_of_a_result(tmp_path: Path) -> None:
    """The same from an ablation, from its file, and from a folder that has the file."""
    result = twice_as_fast()
    for (_, _, repeat), run in result.runs.items():
        with_identity(run, repeat)
    made = of_ablation(result)
    assert set(made.cells) == {"s/base", "s/fast", f"s/base{AGAIN}"} and made.cells["s/fast"].failed == [0, 0, 0]
    assert made.cells["s/fast"].values["TTFT p50"] == [0.5, 0.5125, 0.4875] and all(one.tokens_hold for one in made.cells.values())
    made.save(tmp_path / "new" / KEPT)
    assert read_figures(tmp_path / "new" / KEPT) == read_figures(tmp_path / "new") == made
    result.outputs["s"]["fast"] = OTHER
    assert not of_ablation(result).cells["s/fast"].tokens_hold


def test_kept_figures_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come through the migration; without one, what to do is said."""
    figures().save(tmp_path / "kept.json")
    monkeypatch.setattr(module, "SCHEMA_VERSION", 2)
    with pytest.raises(ResultError, match="schema version 1, which this Octavo cannot read any more"):
        read_figures(tmp_path / "kept.json")
    monkeypatch.setitem(module.MIGRATIONS, 1, lambda content: content | {"doubts": ["migrated"]})
    assert read_figures(tmp_path / "kept.json").doubts == ["migrated"]


def test_figures_of_runs(tmp_path: Path) -> None:
    """One run, and a folder of repeats in the order of their seeds."""
    for seed in (2, 1):
        with_identity(timed("paged", "chunked"), seed).save(tmp_path / "all" / f"run-{3 - seed}")
    one, both = read_figures(tmp_path / "all" / "run-1"), read_figures(tmp_path / "all")
    assert len(one.cells["run"].workloads) == 1 and len(both.cells["run"].workloads) == 2 and not both.problems
    assert both.cells["run"].workloads[1] == one.cells["run"].workloads[0]


def test_what_has_no_figures(tmp_path: Path) -> None:
    """Each says what is missing."""
    result = twice_as_fast()
    with pytest.raises(ResultError, match="says nothing of model and device"):
        of_ablation(result)
    result.finished = False
    with pytest.raises(ResultError, match="not finished: octavo ablate --resume"):
        of_ablation(result)
    result.broken["s/fast/1"] = "out of memory"
    with pytest.raises(ResultError, match="runs broke: s/fast/1: out of memory"):
        of_ablation(result)
    stopped = with_identity(made_run(1.0), 0)
    stopped.complete = False
    with pytest.raises(ResultError, match="was interrupted"):
        of_runs([stopped])
    other = with_identity(made_run(1.0), 1)
    other.identity = replace(IDENTITY, config_hash="d")
    with pytest.raises(ResultError, match="not repeats of each other"):
        of_runs([with_identity(made_run(1.0), 0), other])
    faster = with_identity(made_run(1.0), 1)
    faster.settings = {"request_rate": 2.0}
    with pytest.raises(ResultError, match=r"one was sent with \{\}, another with \{'request_rate': 2\.0\}"):
        of_runs([with_identity(made_run(1.0), 0), faster])
    with pytest.raises(ResultError, match="is no result"):
        read_figures(tmp_path)
    file = tmp_path / "file.json"
    for text, said in (("{", "no figures of Octavo"), ('{"schema_version": 99}', "update Octavo"), ('{"schema_version": 1}', "cells")):
        file.write_text(text)
        with pytest.raises(ResultError, match=said):
            read_figures(file)


def test_a_latency_that_never_came_is_no_number(tmp_path: Path) -> None:
    """JSON has no infinity; such a measure has no ratio."""
    records = [record(0, 1.0, 2.0, 4.0), record(1)]
    one = of_runs([with_identity(made_run(4.0, records=records), 0)])
    assert one.cells["run"].values["TTFT p50"] == [None] and one.cells["run"].failed == [1]
    one.save(tmp_path / "one.json")
    json.loads((tmp_path / "one.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    one = replace(one, problems=[])
    change = next(each for each in compare(one, one).changes if each.measure == "TTFT p50")
    assert change.interval is None and change.problem == "there is no such number in every repeat"

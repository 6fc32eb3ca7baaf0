"""docs/howto/recompute.py comes to the ratios that Octavo prints, without Octavo."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.bench.ablation.agreement import Agreement, Divergence, Outputs
from octavo.bench.ablation.measures import MEASURES
from octavo.bench.ablation.result import AblationResult
from octavo.bench.records import RequestRecord
from tests.bench.ablation.made import (
    AGAIN,
    AGAIN_TOO,
    BASE,
    FAST,
    OTHER,
    PARENTS,
    made,
    made_run,
    record,
    twice_as_fast,
)

SCRIPT = Path(__file__).parents[2] / "docs/howto/recompute.py"


def recomputed(folder: Path) -> dict[tuple[str, ...], float]:
    """By scenario, cell, parent and measure. `-I` and `-S`: neither this folder nor installed packages can be imported."""
    command = [sys.executable, "-I", "-S", str(SCRIPT), str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return {tuple(words[:-1]): float(words[-1]) for words in (line.split("\t") for line in lines)}


def uneven(number: int) -> list[RequestRecord]:
    """Nine answers of different lengths, of two classes, some tokens together, some with a prefix hit; one was refused late."""
    records = []
    for index in range(9):
        sent = 0.1 * index
        first = sent + 0.3 + 0.05 * ((index * 7 + number) % 5)
        gaps = [0.0 if step == 2 else 0.02 + 0.011 * ((index + step * number) % 4) for step in range(index + 1)]
        times = [first := first + gap for gap in (0.0, *gaps)] if index else [first]
        class_name = "chat" if index % 2 else "default"
        records.append(record(index, *times, class_name=class_name, sent=sent, due=sent, first_scheduled=sent + 0.01 * index))
    return [*records, record(9, class_name="default", sent=0.5, ended=0.6, finish_reason="refused", first_scheduled=None)]


def test_every_measure(tmp_path: Path) -> None:
    """Ratios of throughput and of each latency's mean and percentiles, of all and of a class, failures among them."""
    compared = [*MEASURES, "TTFT p95 [chat]", "req/s [chat]"]
    result = twice_as_fast(compared=compared)
    for number, key in enumerate(list(result.runs)):
        result.add(tmp_path, key, made_run(2.0, records=uneven(number)))
    result.save(tmp_path)
    printed = {
        (one.scenario, one.cell, one.parent, one.measure): one.interval.ratio
        for one in AblationResult.load(tmp_path).comparisons("s")
        if one.interval is not None
    }
    found = recomputed(tmp_path)
    assert len(printed) > 30 and printed.keys() <= found.keys()
    assert found == pytest.approx({**found, **printed}, rel=1e-5, nan_ok=True)


def given(result: AblationResult) -> dict[tuple[str, ...], float]:
    """The ratios of a result that Octavo gives; nan where it gives none."""
    found = result.comparisons("s")
    return {(one.scenario, one.cell, one.parent, one.measure): one.interval.ratio if one.interval else math.nan for one in found}


def kept(folder: Path, **fields: object) -> AblationResult:
    """`twice_as_fast` in a folder, as it is loaded from there."""
    result = twice_as_fast(repeats=3, compared=["output tok/s", "TTFT p50"])
    for key, run in list(result.runs.items()):
        result.add(folder, key, run)
    for name, value in fields.items():
        setattr(result, name, value)
    result.save(folder)
    return AblationResult.load(folder)


def test_many_repeats(tmp_path: Path) -> None:
    """From 16 on a fifth at each end is left out: two of 18 that are off by ten times change nothing."""
    fast = [2.0 + 0.01 * number for number in range(16)] + [0.2, 20.0]
    result = made({"base": [4.0] * 18, "fast": fast}, parents={"fast": "base"}, repeats=18, compared=["output tok/s"])
    for key, run in list(result.runs.items()):
        result.add(tmp_path, key, run)
    result.save(tmp_path)
    assert recomputed(tmp_path) == pytest.approx(given(result), rel=1e-5)
    assert [*given(result).values()] == [pytest.approx(4 / 2.075, rel=1e-3)]


def test_an_interrupted_folder(tmp_path: Path) -> None:
    """Of the repeats whose tokens were compared alone, and nothing of what an interrupted write left behind."""
    result = kept(tmp_path, compared={"s": [0, 2]}, finished=False)
    for leftover in (".1.part", ".1.old"):
        for cell in ("base", "fast"):
            made_run(9.0).save(tmp_path / "runs/s" / cell / "9")
            (tmp_path / "runs/s" / cell / "9").rename(tmp_path / "runs/s" / cell / leftover)
    assert recomputed(tmp_path) == pytest.approx(given(result), rel=1e-5, nan_ok=True)
    assert result.pairs("s", "fast", "base") == [0, 2]
    shutil.rmtree(tmp_path / "runs/s/fast/2")
    result = AblationResult.load(tmp_path)
    assert result.pairs("s", "fast", "base") == [0]
    assert recomputed(tmp_path) == pytest.approx(given(result), rel=1e-5, nan_ok=True)
    nothing = kept(tmp_path / "nothing", compared={})
    assert recomputed(tmp_path / "nothing") == pytest.approx(given(nothing), nan_ok=True)


def test_repeats_that_broke(tmp_path: Path) -> None:
    """No ratio, as in the table."""
    result = kept(tmp_path, broken={"s/fast/1": "RuntimeError: no"})
    found = recomputed(tmp_path)
    assert found == pytest.approx(given(result), rel=1e-5, nan_ok=True)
    assert [key[1] for key, value in found.items() if math.isnan(value)] == ["fast", "fast"]


def withheld(result: AblationResult, found: dict[tuple[str, ...], float]) -> set[str]:
    """Cells without a ratio, which are those that Octavo gives none."""
    assert found == pytest.approx(given(result), rel=1e-5, nan_ok=True)
    return {cell for (_, cell, *_), value in found.items() if math.isnan(value)}


INCOMPLETE = Outputs(exact=Agreement(compared=1, equal=1, left_out=1, lost=1))
TIE = Divergence(index=1, seed=0, position=3, expected=5, got=6, distance=1e-6)
TIED = Outputs(exact=Agreement(compared=2, equal=1, divergences=(TIE,)))


@pytest.mark.parametrize(("outputs", "cells"), [(OTHER, {"fast", "faster"}), (INCOMPLETE, {"fast", "faster"}), (TIED, set())])
def test_tokens_that_are_not_the_parents(outputs: Outputs, cells: set[str], tmp_path: Path) -> None:
    """No ratio, nor one to a cell that goes on from there, where tokens differ or an answer is missing; a tie is no difference."""
    parents = {**PARENTS, "faster": "fast"}
    durations = {"base": BASE, "fast": FAST, "faster": FAST, f"base{AGAIN}": AGAIN_TOO}
    result = made(durations, parents=parents, outputs={"fast": outputs}, repeats=3, compared=["output tok/s", "TTFT p50"])
    for key, run in list(result.runs.items()):
        result.add(tmp_path, key, run)
    result.save(tmp_path)
    assert withheld(AblationResult.load(tmp_path), recomputed(tmp_path)) == cells


def test_a_cell_that_failed_more_than_its_parent(tmp_path: Path) -> None:
    """No ratio, since it had less to do; where the parent failed more, there is one."""
    failing = [record(0, 1.0, 2.0), record(1, 1.0, 2.0), record(2)]
    for cell, cells in (("fast", {"fast"}), ("base", set())):
        result = kept(tmp_path / cell)
        result.add(tmp_path / cell, ("s", cell, 1), made_run(2.0, records=failing))
        assert withheld(AblationResult.load(tmp_path / cell), recomputed(tmp_path / cell)) == cells


def test_a_measure_without_values(tmp_path: Path) -> None:
    """Answers of one token have no gaps, a class of which there are none has nothing, and who failed all has no rate."""
    compared = ["ITL p99", "ITL mean", "TPOT p50", "TTFT p50", "TTFT p50 [chat]", "req/s"]
    result = twice_as_fast(repeats=3, compared=compared)
    for key in list(result.runs):
        records = [record(0, 1.0), record(1, 1.0)] if key[1] != "fast" or key[2] else [record(0), record(1)]
        result.add(tmp_path, key, made_run(1.0, records=records))
    result.save(tmp_path)
    found = recomputed(tmp_path)
    assert found == pytest.approx(given(AblationResult.load(tmp_path)), rel=1e-5, nan_ok=True)
    assert found["s", "base (again)", "base", "TTFT p50"] == 1.0 and math.isnan(found["s", "base (again)", "base", "ITL p99"])


def test_a_folder_of_before_repeats_were_counted(tmp_path: Path) -> None:
    """All of them count."""
    kept(tmp_path)
    content = json.loads((tmp_path / "ablation.json").read_text())
    del content["compared"]
    content["schema_version"] = 1
    (tmp_path / "ablation.json").write_text(json.dumps(content))
    assert recomputed(tmp_path) == pytest.approx(given(AblationResult.load(tmp_path)), rel=1e-5)


def test_it_is_short() -> None:
    """Short enough to be read before it is believed, and without a package."""
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 50
    imported = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names)

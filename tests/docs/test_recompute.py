"""docs/howto/recompute.py comes to the ratios that Octavo prints, without Octavo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.bench.ablation.measures import MEASURES
from octavo.bench.ablation.result import AblationResult
from octavo.bench.records import RequestRecord
from tests.bench.ablation.made import made_run, record, twice_as_fast

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


def test_it_is_short() -> None:
    """Short enough to be read before it is believed, and without a package."""
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 50
    imported = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names)

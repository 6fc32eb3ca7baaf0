"""What the comparison of quantised weights computes and prints; its speeds are nobody's business here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from octavo.bench import quantization
from octavo.bench.quantization import Quality, quality_table, speed_table, windows_of
from tests.models import tiny


def test_windows_cover_the_text() -> None:
    """Each token once; a last single one has nothing before it."""
    assert windows_of(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert windows_of(range(9), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_tables() -> None:
    """Perplexity is e to the NLL, agreement the share of equal tokens, ratios those of a round's pair."""
    first, second = Quality(nll=math.log(8), best=[1, 2, 3, 4]), Quality(nll=math.log(9), best=[1, 2, 0, 4])
    lines = quality_table({"float32": first, "int8": second}, {"float32": 2**21, "int8": 2**20})
    assert lines[2:] == ["| float32 | 2.0 | 8.000 | 2.0794 | 100.0% |", "| int8 | 1.0 | 9.000 | 2.1972 | 75.0% |"]
    table = speed_table({8: {"bfloat16": [10.0, 20.0, 40.0], "int8": [20.0, 30.0, 40.0]}})
    assert table[2:] == ["| 8 | 20.0 | 30.0 | 1.50 (1.00 to 2.00) |"]


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tiny model: printed and written alike, with the machine and a line for each variant and number of requests."""
    text, page = tmp_path / "text.txt", tmp_path / "page.md"
    text.write_text("Some text of more than a few letters. " * 3)
    arguments = ["--text", str(text), "--model", str(tiny("llama_gqa")), "--dtype", "float32", "--out", str(page), "--note", "A note."]
    assert quantization.main([*arguments, "--rows", "1", "3", "--new-tokens", "2", "--rounds", "1"]) == 0
    lines = page.read_text().splitlines()
    assert lines == capsys.readouterr().out.splitlines()
    assert lines[0] == quantization.TITLE and lines[3] == "A note." and "threads, Python" in lines[2]
    cells = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert cells == ["weights", "float32", "int8", "int4", "requests at once", "1", "3"]

"""The comparison of linears runs and prints what it says; its figures are nobody's business here."""

from __future__ import annotations

import pytest
import torch

from octavo.bench import native_linears
from octavo.core.native import absence


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_line_a_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """Three ways of each number of rows, and two ratios."""
    monkeypatch.setattr(native_linears, "VOCABULARY", 100)
    native_linears.main(["--rows", "1", "9", "--seconds", "0", "--rounds", "1", "--layers", "1", "--dtype", dtype])
    title, head, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith(f"all linears of SmolLM2-135M in {dtype}, {torch.get_num_threads()} threads")
    assert [line.split("|")[1].strip() for line in lines] == ["1", "9"]
    assert {len(line.split("|")) for line in (head, *lines)} == {8}
    assert all(float(cell) > 0 for line in lines for cell in line.split("|")[5:7])

"""The bar of `octavo bench serve`: how many requests there are, how many are over, and how many of these failed."""

from __future__ import annotations

import io
import re
import sys

import pytest

from octavo.bench.records import RequestRecord
from octavo.cli.bench.progress import bar


class Terminal(io.StringIO):
    """Somebody looks."""

    def isatty(self) -> bool:
        return True


def over(index: int, error: str = "") -> RequestRecord:
    return RequestRecord(index=index, num_prompt_tokens=1, max_tokens=1, due=0.0, sent=0.0, ended=1.0, error=error)


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, total: int, errors: list[str], shown: bool = True) -> str:
    """What is seen at the end, when so many requests are over."""
    monkeypatch.setattr(sys, "stderr", stream)
    with bar(total, shown=shown) as progress:
        for index, error in enumerate(errors):
            progress(over(index, error))
    return stream.getvalue().rpartition("\r")[2]


def test_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its description, its count beside the total, and failures where there are some."""
    assert re.match(r"Requests: 100%\|.{10}\| 4/4 \[", drawn(monkeypatch, Terminal(), total=4, errors=[""] * 4))
    part = drawn(monkeypatch, Terminal(), total=4, errors=["", "refused", "timeout"])
    assert part.startswith("Requests:  75%|") and "| 3/4 [" in part and "request/s, 2 failed]" in part
    assert "failed" not in drawn(monkeypatch, Terminal(), total=2, errors=["", ""])
    assert "| 0/2 [00:00<?, ?request/s]" in drawn(monkeypatch, Terminal(), total=2, errors=[])


def test_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn into a file, nor where it is switched off."""
    assert drawn(monkeypatch, io.StringIO(), total=2, errors=["", "refused"]) == ""
    assert drawn(monkeypatch, Terminal(), total=2, errors=["", "refused"], shown=False) == ""

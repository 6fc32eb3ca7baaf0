"""The tutorials that compare two stacks: the counts that they show come out; seconds are of the machine that they name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from octavo.bench.comparisons import COMPARISONS, main
from tests.models import tiny

TUTORIAL = Path(__file__).parents[2] / "docs/tutorial"
FENCED = r"^    python -m octavo\.bench\.comparisons (\S+)\n\n```\n(.*?)^```$"
SHOWN = dict(re.findall(FENCED, (TUTORIAL / "comparisons.md").read_text(), re.MULTILINE | re.DOTALL))
OF_THE_MACHINE = ("stack", "longest step, s", "all, s", "the same tokens: yes")


def counts(printed: str) -> list[list[str]]:
    """The lines of a comparison's table that every machine and model gives, in columns."""
    return [re.split(r"\s{2,}", line) for line in printed.splitlines() if line and not line.startswith(OF_THE_MACHINE)]


def test_all_are_shown() -> None:
    """Each with its command."""
    assert set(SHOWN) == set(COMPARISONS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "static-continuous")) for name in COMPARISONS])
def test_the_counts_of_a_comparison(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, batches, slots and tokens depend on lengths alone: a tiny model that has these token ids gives what SmolLM2 gives."""
    main([name, "--model", str(tiny("llama_gqa", vocab_size=21_000, max_position_embeddings=2048))])
    assert counts(capsys.readouterr().out) == counts(SHOWN[name])


@pytest.mark.slow
def test_the_first_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    """Its prompts are text, so that it takes SmolLM2 to count their tokens. All but the seconds."""
    (shown,) = re.findall(r"^```\n( +steps .*?)^```$", (TUTORIAL / "first-comparison.md").read_text(), re.MULTILINE | re.DOTALL)
    runpy.run_path(str(TUTORIAL / "first_comparison.py"))["main"]("smollm2-135m")
    printed = [line if line.startswith("the same") else line[:-9] for line in capsys.readouterr().out.splitlines()]  # without seconds
    assert printed == shown.splitlines() and len(printed) == 4

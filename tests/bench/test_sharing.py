"""What the sharing benchmark adds up is what a pencil gives, and its lengths are what it says."""

from __future__ import annotations

import math
import random
from statistics import stdev

import pytest

from octavo.bench.sharing import DATA_SETS, lengths, main, share_of_beams, share_of_samples, write_prompts
from octavo.llm import LLM
from tests.matrix.stacks import REGISTRY
from tests.models import tiny


@pytest.mark.parametrize("mean", [19, 338])
def test_lengths_have_their_mean_and_spread(mean: int) -> None:
    """Lognormal; another generator gives another order of the same lengths."""
    found = lengths(mean, 1000, spread=0.8, rng=random.Random(0))
    assert sum(found) / 1000 == pytest.approx(mean, rel=0.02)
    assert stdev(math.log(length) for length in found) == pytest.approx(0.8, rel=0.08)
    other = lengths(mean, 1000, spread=0.8, rng=random.Random(1))
    assert found != other and sorted(found) == sorted(other)


def test_samples_of_one_request() -> None:
    """Prompt 30, answer 10, n = 4 in blocks of 16: named and there in each step, as in `test_physical_blocks_of_four_samples`."""
    named, there = [8, 8, 8, *[12] * 6], [2, 5, 5, *[9] * 6]
    expected = (sum(named) - sum(there)) / sum(named)
    assert share_of_samples(REGISTRY, [(30, 10)], 4) == pytest.approx(expected)
    assert share_of_samples(REGISTRY, [(30, 10)] * 5, 4) == pytest.approx(expected)
    assert share_of_samples(REGISTRY, [(30, 10)], 1) == 0.0


def test_beams_share_more_than_their_prompt() -> None:
    """They part later than samples do; the observer is gone afterwards."""
    with LLM(tiny("llama_gqa"), allocator={"plugin": "paged"}, device="cpu", dtype="float32", max_model_len=128, num_kv_slots=2048) as llm:
        prompts = write_prompts(llm, [30, 7])
        assert [len(prompt) for prompt in prompts] == [30, 7]
        shares = [share_of_beams(llm, prompts, [40, 40], width) for width in (1, 2, 4)]
        assert shares[0] == 0.0
        assert [share_of_beams(llm, prompts, [40, 40], width) for width in (1, 2, 4)] == shares
    for width, share in ((2, shares[1]), (4, shares[2])):
        assert share_of_samples(REGISTRY, [(30, 40), (7, 40)], width) < share < 1


def test_the_table_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each data set, with the paper's figures in it; ShareGPT's reach what the paper saved."""
    assert main(["--requests", "60", "--beam-requests", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert len(lines) == len(DATA_SETS)
    for line, data in zip(lines, DATA_SETS, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0].startswith(data.name) and cells[1] == "samples" and cells[-1] == f"{data.samples[0]} to {data.samples[1]}"
        two, four, six = map(float, cells[2:5])
        assert two < four < six
    assert two > 16.0 and six > 27.0

"""Scores of logits against torch's log_softmax and a plain sort."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.logprobs import LEAST
from octavo.core.scoring import MAX_ROWS, likeliest, score_rows

VOCAB = 97


def _order(row: list[float]) -> list[int]:
    """Ids from the largest logit down, of equal ones the lowest first."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def _random(count: int, *, tied: bool) -> torch.Tensor:
    torch.manual_seed(count)
    logits = torch.randn(count, VOCAB) * 8
    return logits.round() if tied else logits


@pytest.mark.parametrize("tied", [False, True], ids=["", "many ties"])
@pytest.mark.parametrize("count", [0, 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS + 40])
def test_scores_equal_log_softmax_and_a_sort(count: int, tied: bool) -> None:
    """Values within 1e-5, ranks exact, the likeliest in their order with ties by id; each row has as many as it asks for.

    No more than MAX_ROWS rows are looked at at once (fault 54).
    """
    logits = _random(count, tied=tied)
    targets = torch.randint(VOCAB, (count,))
    num_top = np.array([(0, 1, 5, VOCAB)[i % 4] for i in range(count)], dtype=np.int64)
    asked: list[int] = []

    def logits_of(rows: slice) -> torch.Tensor:
        part = logits[rows]
        asked.append(len(part))
        return part

    entries = score_rows(logits_of, targets, num_top).entries()
    assert sum(asked) == count == len(entries)
    assert max(asked) <= MAX_ROWS
    expected = logits.log_softmax(-1)
    for row, entry, target, most in zip(range(count), entries, targets.tolist(), num_top.tolist(), strict=True):
        plain = logits[row].tolist()
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(float(expected[row, target]), abs=1e-5)
        assert entry.rank == 1 + sum(value > plain[target] for value in plain)
        assert [token for token, _ in entry.top] == _order(plain)[:most]
        assert [value for _, value in entry.top] == pytest.approx([float(expected[row, token]) for token, _ in entry.top], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_scored_in_fp32(dtype: torch.dtype) -> None:
    """As their values are, not as 16 bits can say a logarithm; and they are left as they were."""
    logits = _random(3, tied=False).to(dtype)
    before = logits.clone()
    scores = score_rows(logits.__getitem__, torch.tensor([4, 5, 6]), np.array([2, 2, 2]))
    assert scores.logprobs.dtype == scores.top_logprobs.dtype == torch.float32
    expected = logits.double().log_softmax(-1)
    assert scores.logprobs.tolist() == pytest.approx(expected[[0, 1, 2], [4, 5, 6]].tolist(), abs=1e-5)
    assert torch.equal(logits, before)


def test_any_floats_are_put_in_order() -> None:
    """Zeros of both signs are equal, infinities and tiny numbers have their places."""
    row = [0.0, -0.0, 1e-40, -1e-40, math.inf, -math.inf, 3.0, -3.0, 0.0, 3.0000002, -3.0000002]
    row = torch.tensor(row).tolist()
    assert likeliest(torch.tensor([row]), len(row))[0].tolist() == _order(row)
    assert _order(row)[4:7] == [0, 1, 8]  # not by the sign of a zero


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_told(bad: float) -> None:
    """A row with NaN or infinity has no log probabilities, wherever in it they stand; its neighbours have theirs."""
    logits = _random(3, tied=False)
    logits[1, 50] = bad
    values = [entry.logprob for entry in score_rows(logits.__getitem__, torch.tensor([4, 5, 6]), np.zeros(3, dtype=np.int64)).entries()]
    assert [math.isnan(value) for value in values] == [False, True, False]


def test_log_probabilities_are_finite() -> None:
    """A token that the model rules out (-inf) gets LEAST, chosen or among the likeliest."""
    logits: Any = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3] = 1.0
    [entry] = score_rows(logits.__getitem__, torch.tensor([7]), np.array([2])).entries()
    assert (entry.logprob, entry.rank, entry.top) == (LEAST, 2, ((3, 0.0), (0, LEAST)))

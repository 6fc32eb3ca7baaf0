"""Rows seen as blocks: what is computed of one doesn't depend on the others, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.sampling_blocks import BLOCK, block_masses, draw_from_blocks, find_peaks, runs, scales


def _logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4


@pytest.mark.parametrize("vocab", [1, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 5])
def test_peaks_are_the_maxima(vocab: int) -> None:
    """Of blocks and of rows; of equal ones the lowest id; NaN wins, and a row of minus infinities has its first token."""
    logits = _logits(5, vocab).round()
    logits[2] = -torch.inf
    logits[3, vocab // 2] = torch.nan
    peaks = find_peaks(logits)
    blocks = [logits[:, begin : begin + BLOCK].amax(1) for begin in range(0, vocab, BLOCK)]
    torch.testing.assert_close(peaks.of_blocks, torch.stack(blocks, 1), equal_nan=True, rtol=0, atol=0)
    assert peaks.ids.tolist() == logits.argmax(1).tolist()
    torch.testing.assert_close(peaks.of_rows, logits.amax(1), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("vocab", [200, 5 * BLOCK + 3, 49_152])
def test_masses_of_blocks_are_the_same_bits_in_any_company(vocab: int) -> None:
    """Of one row, of runs of any length, of rows here and there; and they are the sums of exp."""
    logits = _logits(24, vocab)
    best, scale = logits.amax(1), torch.from_numpy(scales(np.linspace(0.2, 3, 24)))
    every = block_masses(logits, np.arange(24), best=best, scale=scale)
    for rows in (np.array([5]), np.array([0, 1, 2, 9, 10, 23]), np.arange(3, 20)):
        assert torch.equal(block_masses(logits, rows, best=best[rows], scale=scale[rows]), every[rows])
    exact = ((logits - best[:, None]).double() / torch.linspace(0.2, 3, 24).double()[:, None]).exp().sum(1)
    torch.testing.assert_close(every.double().sum(1), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("vocab", [60, 3 * BLOCK + 5])
def test_draws_invert_the_whole_distribution_function(vocab: int) -> None:
    """In the order of ids: 2,000 evenly spaced uniforms give the ids that one cumulative sum over the vocabulary gives."""
    logits = _logits(2, vocab)
    best, scale = logits.amax(1), torch.from_numpy(scales(np.array([0.7, 1.5])))
    sums = block_masses(logits, np.arange(2), best=best, scale=scale)
    uniforms = ((torch.arange(2000, dtype=torch.float64) + 0.5) / 2000).expand(2, -1)
    drawn = draw_from_blocks(logits, sums, uniforms, best=best, scale=scale)
    for row, temperature in enumerate((0.7, 1.5)):
        cumulative = (logits[row].double() / temperature).softmax(0).cumsum(0)
        expected = torch.searchsorted(cumulative, uniforms[row].contiguous(), right=True)
        near = (cumulative[drawn[row]] - uniforms[row]).abs() < 1e-5
        assert bool(((drawn[row] == expected) | near).all()) and int((drawn[row] != expected).sum()) <= 5


def test_a_token_without_mass_is_never_drawn() -> None:
    """Not even by the uniforms next to 0 and to 1, nor where rounding makes 1 of one."""
    logits = torch.full((1, 2 * BLOCK), -torch.inf)
    logits[0, [BLOCK + 3, BLOCK + 7]] = torch.tensor([1.0, 1.0])
    best, scale = logits.amax(1), torch.ones(1)
    sums = block_masses(logits, np.arange(1), best=best, scale=scale)
    uniforms = torch.tensor([[0.0, 0.4999, 0.5, 1 - 2.0**-52, 1.0]], dtype=torch.float64)
    drawn = draw_from_blocks(logits, sums, uniforms, best=best, scale=scale)
    assert drawn.tolist() == [[BLOCK + 3, BLOCK + 3, BLOCK + 7, BLOCK + 7, BLOCK + 7]]


def test_runs_are_consecutive_and_not_too_long() -> None:
    """All rows, in their order."""
    rows = np.array([0, 1, 2, 3, 7, 9, 10])
    assert list(runs(rows, 3)) == [(0, 3), (3, 4), (4, 5), (5, 7)]
    assert list(runs(rows[:0], 3)) == []

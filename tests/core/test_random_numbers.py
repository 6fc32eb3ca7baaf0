"""Uniform numbers are a function of seed, sample index and position, evenly spread, and unrelated between neighbouring triples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from octavo.core.random_numbers import uniforms

COUNT = 100_000


def _along(axis: str) -> npt.NDArray[np.float64]:
    triple = {name: np.full(COUNT, 3, dtype=np.uint64) for name in ("seeds", "sample_indices", "positions")}
    triple[axis] = np.arange(COUNT, dtype=np.uint64)
    return uniforms(**triple)


@pytest.mark.parametrize("axis", ["seeds", "sample_indices", "positions"])
def test_numbers_along_each_axis_are_even_and_unrelated(axis: str) -> None:
    """Chi-square over 100 cells, and of pairs of neighbours over 10 x 10 cells, within six standard deviations of 99."""
    drawn = _along(axis)
    assert 0 <= drawn.min() < 1e-3 and 1 - 1e-3 < drawn.max() < 1
    for cells in (drawn * 100, drawn[:-1:2] * 10 // 1 * 10 + drawn[1::2] * 10):
        counts = np.bincount(cells.astype(int), minlength=100)
        expected = counts.sum() / 100
        assert ((counts - expected) ** 2 / expected).sum() < 99 + 6 * (2 * 99) ** 0.5


def test_axes_do_not_stand_in_for_one_another() -> None:
    """Position 1 of sample 0 is not position 0 of sample 1, nor is either that of the next seed."""
    triples = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0], [2**64 - 1, 0, 0]], dtype=np.uint64)
    assert len(set(uniforms(*triples.T).tolist())) == 5


def test_known_values_do_not_change() -> None:
    """A seed gives the same output in every release: the numbers are pinned."""
    drawn = uniforms(*np.array([[0, 0, 0], [1, 2, 3]], dtype=np.uint64).T)
    assert drawn.tolist() == pytest.approx([0.13870941014555416, 0.4175580595044026], abs=1e-15)

"""Means and percentiles are numpy's; what is missing is longer than anything measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from octavo.bench.distribution import Distribution

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(VALUES, st.floats(0, 100))
def test_as_numpy(values: list[float], percent: float) -> None:
    """Mean, median and any percentile."""
    found = Distribution(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.median == pytest.approx(np.median(values))
    assert found.percentile(percent) == pytest.approx(np.percentile(values, percent))


@given(VALUES, st.integers(1, 40), st.floats(0, 100))
def test_missing_values_are_the_longest(values: list[float], missing: int, percent: float) -> None:
    """A percentile with some is that of numbers beyond all measured ones, or infinite where it reaches them."""
    found = Distribution(values, missing=missing).percentile(percent)
    reach = (len(values) + missing - 1) * percent / 100
    if reach > len(values) - 1:
        assert found == math.inf
    else:
        assert found == pytest.approx(np.percentile([*values, *[1e9] * missing], percent))


def test_without_values() -> None:
    """Nothing is nothing, and only misses are infinite."""
    assert math.isnan(Distribution([]).mean) and math.isnan(Distribution([]).median)
    assert Distribution([], missing=2).median == math.inf and math.isnan(Distribution([], missing=2).mean)
    with pytest.raises(ValueError, match="between 0 and 100, not 101"):
        Distribution([1.0]).percentile(101)

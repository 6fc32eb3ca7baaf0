"""Regions of a row of slots: placed at the first run that fits, merged as they come back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from octavo.core.errors import PluginContractError
from octavo.plugins.allocators.first_fit import FirstFit


def test_the_first_run_that_is_long_enough_is_taken() -> None:
    space = FirstFit(10)
    assert [space.take(3), space.take(2), space.take(3)] == [0, 3, 5]
    space.give(0, 3)
    space.give(5, 3)
    assert space.runs == [(0, 3), (5, 5)]
    assert space.take(4) == 5
    assert space.take(4) is None
    assert space.take(3) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_merge_in_whatever_order_they_come_back(order: tuple[int, ...]) -> None:
    space = FirstFit(9)
    starts = [space.take(3) for _ in range(3)]
    for index in order:
        start = starts[index]
        assert start is not None
        space.give(start, 3)
    assert space.runs == [(0, 9)]


@pytest.mark.parametrize(("start", "length"), [(2, 2), (0, 1), (1, 1), (3, 2), (1, 9), (8, 3), (-1, 2)])
def test_giving_back_what_is_free_or_outside_raises_and_changes_nothing(start: int, length: int) -> None:
    """Fault 16. Held are slots 2 and 4..9 of 10."""
    space = FirstFit(10)
    space.take(10)
    space.give(0, 2)
    space.give(3, 1)
    with pytest.raises(PluginContractError, match=f"slots {start}..{start + length - 1} were given back but are free already, or outside"):
        space.give(start, length)
    assert space.runs == [(0, 2), (3, 1)]
    assert space.free == 3


def test_check_names_gaps_and_overlaps() -> None:
    space = FirstFit(10)
    space.take(4)
    space.check([(0, 4)])
    with pytest.raises(PluginContractError, match=r"slots 2\.\.3 are neither held nor free"):
        space.check([(0, 2)])
    with pytest.raises(PluginContractError, match=r"slots 4\.\.5 are held or free twice"):
        space.check([(0, 6)])
    space.free = 5
    with pytest.raises(PluginContractError, match="5 slots are counted as free, the runs hold 6"):
        space.check([(0, 4)])


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60))
def test_held_and_free_always_cover_the_row(acts: list[tuple[int, bool]]) -> None:
    """And a region is refused only when no run is long enough."""
    space = FirstFit(24)
    held: list[tuple[int, int]] = []
    for length, back in acts:
        if back and held:
            space.give(*held.pop(length % len(held)))
        else:
            longest = max((run for _, run in space.runs), default=0)
            start = space.take(length)
            assert (start is None) == (longest < length)
            if start is not None:
                held.append((start, length))
        space.check(held)
    for start, length in held:
        space.give(start, length)
    assert space.runs == [(0, 24)]

"""Regions in powers of two: halved until they fit, merged as they come back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from octavo.core.errors import PluginContractError
from octavo.plugins.allocators.buddy import Buddy, next_power_of_two


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (25, 32), (32, 32), (33, 64)])
def test_next_power_of_two(number: int, power: int) -> None:
    """The paper's example: an output of 25 reserves 32."""
    assert next_power_of_two(number) == power


def test_a_region_is_halved_out_of_the_smallest_block_that_holds_it() -> None:
    space = Buddy(16)
    assert [space.take(3), space.take(2), space.take(5)] == [0, 4, 8]
    assert space.runs == [(6, 2)]
    assert (space.free, space.rounding) == (2, 1 + 0 + 3)
    assert space.take(3) is None
    assert space.take(2) == 6


def test_two_halves_become_one_again_and_others_do_not() -> None:
    space = Buddy(16)
    for _ in range(4):
        space.take(4)
    space.give(4, 4)
    space.give(8, 4)
    assert space.runs == [(4, 4), (8, 4)]  # neighbours, but of different halves
    space.give(0, 4)
    assert space.runs == [(0, 8), (8, 4)]
    space.give(12, 4)
    assert space.runs == [(0, 16)]


def test_a_pool_that_is_no_power_of_two_starts_as_several() -> None:
    space = Buddy(13)
    assert space.runs == [(0, 8), (8, 4), (12, 1)]
    assert [space.take(4), space.take(1), space.take(8)] == [8, 12, 0]
    for start, length in ((8, 4), (12, 1), (0, 8)):
        space.give(start, length)
    assert space.runs == [(0, 8), (8, 4), (12, 1)]


@pytest.mark.parametrize(("start", "length"), [(0, 4), (2, 1), (4, 2), (16, 1)])
def test_giving_back_what_was_not_taken_raises_and_changes_nothing(start: int, length: int) -> None:
    """Fault 16. Held are 3 slots from 0, and 1 from 4."""
    space = Buddy(16)
    space.take(3)
    space.take(1)
    with pytest.raises(
        PluginContractError, match=f"slots {start}..{start + length - 1} were given back but are free already, or no region"
    ):
        space.give(start, length)
    space.check([(0, 3), (4, 1)])


def test_check_names_what_is_wrong() -> None:
    space = Buddy(8)
    space.take(3)
    space.check([(0, 3)])
    with pytest.raises(PluginContractError, match=r"regions \[\] are held, \[\(0, 3\)\] were taken"):
        space.check([])
    space.rounding = 0
    with pytest.raises(PluginContractError, match=r"4 free slots and 0 lost to rounding are counted, there are \(4, 1\)"):
        space.check([(0, 3)])
    space._free[2].clear()
    with pytest.raises(PluginContractError, match="regions and free blocks cover 4 slots of 8"):
        space.check([(0, 3)])
    space._free[2].append(2)
    with pytest.raises(PluginContractError, match=r"block 2\.\.5 does not follow slot 3, or is not aligned"):
        space.check([(0, 3)])


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60))
def test_held_and_free_always_cover_the_pool(capacity: int, acts: list[tuple[int, bool]]) -> None:
    """And a region is refused only when no block is large enough."""
    space = Buddy(capacity)
    empty = space.runs
    held: list[tuple[int, int]] = []
    for length, back in acts:
        if back and held:
            space.give(*held.pop(length % len(held)))
        else:
            longest = max((run for _, run in space.runs), default=0)
            start = space.take(length)
            assert (start is None) == (longest < next_power_of_two(length))
            if start is not None:
                held.append((start, length))
        space.check(held)
    for start, length in held:
        space.give(start, length)
    assert space.runs == empty


@given(st.integers(1, 60), st.lists(st.integers(1, 12), max_size=12))
def test_what_fits_an_empty_pool_is_placed_in_any_order(capacity: int, lengths: list[int]) -> None:
    space = Buddy(capacity)
    placed = [space.take(length) for length in lengths]
    assert Buddy(capacity).fits(lengths) == (None not in placed)

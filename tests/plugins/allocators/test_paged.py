"""Paged allocation: blocks follow positions, forks share them until they write, and the books are right after every step."""

from __future__ import annotations

import pytest

from octavo.core.errors import InvalidOptionsError, PluginContractError
from octavo.core.plan import Transfer
from octavo.core.request import Sequence
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from tests.plugins.allocators.memory import blocks, compute, family, fork, request, start


def pool(num_blocks: int, *, block_size: int = 4, host_blocks: int = 0) -> PagedAllocator:
    return PagedAllocator(capacity=num_blocks * block_size, block_size=block_size, host_capacity=host_blocks * block_size)


# ------------------------------------------------------------------- literal examples


def test_30_tokens_hold_2_blocks_of_16_with_2_slots_empty() -> None:
    """Requirements, last section."""
    kv = pool(8, block_size=16)
    lead = start(kv, request(30, 1))
    assert blocks(kv, lead) == [0, 1]
    usage = kv.usage()
    assert (usage.filled, usage.held, usage.free) == (30, 2, 96)


def test_2_tokens_in_a_block_of_20_a_hundred_times_leave_1800_slots_empty() -> None:
    """Requirements, last section: reranking's waste in the last block."""
    kv = pool(100, block_size=20)
    for number in range(100):
        start(kv, request(2, 1, name=str(number)))
    usage = kv.usage()
    assert (usage.filled, usage.held, usage.free) == (200, 1_800, 0)


def test_30_outputs_after_a_prompt_of_p_fill_p_plus_29_slots() -> None:
    """The KV of the last sampled token is never written."""
    kv = pool(80, block_size=1)
    one = request(11, 30)
    lead = start(kv, one)
    while lead.num_next > 0:
        compute(kv, lead, lead.num_computed + 1)
    assert len(lead.output) == 30
    assert kv.usage().filled == 11 + 29


# ------------------------------------------------------------------------ growth


def test_a_block_is_taken_only_when_the_last_is_full() -> None:
    kv = pool(4)
    lead = start(kv, request(3, 8))
    held = []
    for _ in range(6):
        compute(kv, lead, lead.num_computed + 1)
        held.append(len(blocks(kv, lead)))
    assert held == [1, 2, 2, 2, 2, 3]


def test_a_refusal_changes_nothing_and_a_smaller_wish_is_granted() -> None:
    kv = pool(3)
    lead = start(kv, request(4, 20))
    before = kv.usage()
    assert not kv.reserve(lead, 4, 13)
    assert kv.usage() == before
    assert blocks(kv, lead) == [0]
    assert kv.reserve(lead, 4, 12)


def test_a_grant_outlives_the_step_it_was_for() -> None:
    """Fault 15: the request is dropped from the step; asked again, it gets the same slots, and no more."""
    kv = pool(4)
    lead = start(kv, request(4, 8))
    assert kv.reserve(lead, 4, 5)
    granted = blocks(kv, lead)
    assert kv.reserve(lead, 4, 5)
    assert blocks(kv, lead) == granted
    assert kv.usage().held == 4


def test_blocks_come_back_tail_first_and_go_out_in_order() -> None:
    kv = pool(4)
    lead = start(kv, request(16, 1))
    assert blocks(kv, lead) == [0, 1, 2, 3]
    kv.observed = True
    kv.close(lead)
    assert [event.start for event in kv.drain_events()] == [12, 8, 4, 0]
    assert blocks(kv, start(kv, request(16, 1))) == [0, 1, 2, 3]


def test_capacity_is_rounded_down_to_whole_blocks() -> None:
    kv = PagedAllocator(capacity=39, block_size=16, host_capacity=31)
    assert (kv.capacity, kv.host_capacity, kv.block_size) == (32, 16, 16)


def test_a_pool_of_less_than_a_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidOptionsError, match="block_size = 16, but the KV pool has 15 slots"):
        PagedAllocator(capacity=15, block_size=16)
    with pytest.raises(InvalidOptionsError, match="block_size = 1, but the KV pool has 0 slots"):
        PagedAllocator(capacity=0, block_size=1)


# ------------------------------------------------------------------ fork and copy


def test_a_fork_shares_physical_blocks_and_counts_their_slots_once() -> None:
    kv = pool(8)
    lead, child = family(kv, 10, n=2)
    assert blocks(kv, child) == blocks(kv, lead) == [0, 1, 2]
    assert kv.drain_transfers() == []
    usage = kv.usage()
    assert (usage.filled, usage.held, usage.free) == (10, 2, 20)


def test_a_fork_of_full_blocks_copies_nothing() -> None:
    kv = pool(8)
    lead, child = family(kv, 8, n=2)
    compute(kv, child, 9)
    compute(kv, lead, 9)
    assert blocks(kv, child) == [0, 1, 2]
    assert blocks(kv, lead) == [0, 1, 3]
    assert kv.drain_transfers() == []
    assert kv.stats().copies == 0


def test_only_the_shared_block_about_to_be_written_is_copied_and_the_last_owner_writes_in_place() -> None:
    """Fault 49: the next position fits the shared partial block, so a check by count would copy nothing."""
    kv = pool(8)
    lead, second, third = family(kv, 10, n=3)
    compute(kv, second, 11)
    assert blocks(kv, second) == [0, 1, 3]
    assert blocks(kv, lead) == blocks(kv, third) == [0, 1, 2]
    compute(kv, lead, 11)
    assert blocks(kv, lead) == [0, 1, 4]
    compute(kv, third, 11)
    assert blocks(kv, third) == [0, 1, 2]
    assert kv.drain_transfers() == [Transfer("copy", 8, 12, 4), Transfer("copy", 8, 16, 4)]
    assert kv.stats().copies == kv.stats().transfers == 2
    assert kv.usage().filled == 8 + 3 * 3
    kv.check()


def test_a_fork_takes_no_block_beyond_what_it_shares() -> None:
    """The parent holds room for positions that it has not computed: the child has no part in it."""
    kv = pool(8)
    lead = start(kv, request(6, 8, n=2))
    assert kv.reserve(lead, 6, 12)
    child = fork(kv, lead)
    assert blocks(kv, lead) == [0, 1, 2]
    assert blocks(kv, child) == [0, 1]


def test_a_copy_that_finds_no_room_is_refused_and_nothing_changes() -> None:
    kv = pool(3)
    lead, child = family(kv, 10, n=2)
    assert not kv.reserve(child, 10, 11)
    assert blocks(kv, child) == blocks(kv, lead)
    assert kv.drain_transfers() == []
    kv.close(lead)
    assert kv.reserve(child, 10, 11)
    assert blocks(kv, child) == [0, 1, 2]
    assert kv.drain_transfers() == []


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    kv = pool(4)
    lead, child = family(kv, 10, n=2)
    kv.close(lead)
    assert kv.usage().free == 4
    kv.close(child)
    assert kv.usage().free == 16
    kv.check()


def test_what_is_not_committed_cannot_be_shared() -> None:
    kv = pool(4)
    lead = start(kv, request(8, 4, n=2), computed=4)
    assert kv.reserve(lead, 4, 8)
    with pytest.raises(PluginContractError, match="'r/0' was to share 8 positions, 4 are committed"):
        kv.fork(lead, Sequence("r/1", lead.request), 8)


@pytest.mark.parametrize(("block_size", "fitting"), [(1, 10 + 3 * 7), (4, 8 + 3 * 12), (16, 3 * 32)])
def test_fits_counts_what_seats_share_and_is_exact(block_size: int, fitting: int) -> None:
    """Three seats of 17 positions share the full blocks of a prompt of 10; in a pool of just that size all reach their end."""
    one = request(10, 8, n=3)
    assert not PagedAllocator(capacity=fitting - block_size, block_size=block_size).fits(one)
    kv = PagedAllocator(capacity=fitting, block_size=block_size)
    assert kv.fits(one)
    lead = start(kv, one)
    for sequence in [lead, fork(kv, lead, 1), fork(kv, lead, 2)]:
        compute(kv, sequence, sequence.max_positions)
    assert kv.usage().free == 0


def test_fits_adds_up_several_requests() -> None:
    kv = pool(5)
    assert kv.fits(request(8, 1), request(12, 1))
    assert not kv.fits(request(8, 1), request(13, 1))
    assert kv.fits(request(6, 1, n=64))  # nobody writes after the prompt: all share its blocks


# --------------------------------------------------------------------- block table


def test_dirty_from_is_the_first_entry_changed_since_the_last_read() -> None:
    kv = pool(16)
    lead, child = family(kv, 10, n=2)
    assert kv.table(child)[1] == 0
    assert kv.table(child)[1] == 3
    compute(kv, child, 11)  # copies the third block
    assert kv.table(child)[1] == 2
    compute(kv, child, 12)  # within it
    assert kv.table(child)[1] == 3
    compute(kv, child, 17)  # two more
    assert kv.table(child)[1] == 3
    assert kv.table(child)[1] == 5
    assert kv.table(lead)[1] == 0


def test_the_table_is_an_int32_view_that_grows_by_doubling() -> None:
    kv = pool(64, block_size=1)
    lead = start(kv, request(1, 60))
    bases = set()
    for stop in range(2, 41):
        compute(kv, lead, stop)
        row, _ = kv.table(lead)
        assert row.dtype == "int32"
        assert row.tolist() == list(range(stop))
        assert row.base is not None
        bases.add(len(row.base))
    assert bases == {8, 16, 32, 64}

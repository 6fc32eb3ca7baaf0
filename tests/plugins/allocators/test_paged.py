"""Paged allocation: blocks follow positions, forks share them until they write, and the books are right after every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.core.errors import InvalidOptionsError, PluginContractError
from octavo.core.kv import BlockEvent
from octavo.core.plan import Transfer
from octavo.core.request import Sequence
from octavo.plugins.allocators.block_pool import Shelf
from octavo.plugins.allocators.paged import PAGED
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from tests.plugins.allocators.memory import compute, fork, request, start


def blocks(kv: PagedAllocator, sequence: Sequence) -> list[int]:
    return kv.table(sequence)[0].tolist()


def pool(num_blocks: int, *, block_size: int = 4, host_blocks: int = 0) -> PagedAllocator:
    return PagedAllocator(capacity=num_blocks * block_size, block_size=block_size, host_capacity=host_blocks * block_size)


def family(kv: PagedAllocator, prompt: int, *, n: int, max_tokens: int = 8) -> list[Sequence]:
    """A lead with its prompt computed, and n - 1 forks of it; each has sampled its first token."""
    lead = start(kv, request(prompt, max_tokens, n=n))
    sequences = [lead, *(fork(kv, lead, i) for i in range(1, n))]
    lead.request.forked = True
    return sequences


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
        bases.add(len(row.base))
    assert bases == {8, 16, 32, 64}


# -------------------------------------------------------------------- host memory


def test_a_group_is_suspended_once_a_block_and_comes_back_shared_as_it_was() -> None:
    kv = pool(8, host_blocks=4)
    lead, child = family(kv, 10, n=2)
    compute(kv, child, 11)
    kv.drain_transfers()
    assert kv.suspend([lead, child])
    assert [transfer.kind for transfer in kv.drain_transfers()] == ["out"] * 4  # two shared blocks and one of each
    assert (kv.usage().free, kv.usage().host) == (32, 16)
    assert kv.resume([lead, child]) == [10, 11]
    assert [transfer.kind for transfer in kv.drain_transfers()] == ["in"] * 4
    assert blocks(kv, lead)[:2] == blocks(kv, child)[:2]
    assert blocks(kv, lead)[2] != blocks(kv, child)[2]
    assert (kv.usage().filled, kv.usage().host) == (8 + 2 + 3, 0)
    assert kv.table(lead)[1] == 3
    kv.check()


@pytest.mark.parametrize("host_blocks", range(3))
def test_suspend_is_all_or_nothing(host_blocks: int) -> None:
    """Three distinct blocks: with room for fewer on the host nothing changes."""
    kv = pool(8, host_blocks=host_blocks)
    lead, child = family(kv, 10, n=2)
    before, tables = kv.usage(), [blocks(kv, lead), blocks(kv, child)]
    assert not kv.suspend([lead, child])
    assert kv.usage() == before
    assert [blocks(kv, lead), blocks(kv, child)] == tables
    assert kv.drain_transfers() == []
    kv.check()


@pytest.mark.parametrize("room", range(6))
def test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal(room: int) -> None:
    """Fault 51. Three sequences share 3 blocks, the last in part; to write on, all but one need a copy: 5 blocks, not 6."""
    kv = pool(5, host_blocks=3)
    sequences = family(kv, 10, n=3)
    assert kv.suspend(sequences)
    for sequence in sequences:
        sequence.num_computed = sequence.num_scheduled = 0
    other = start(kv, request(4 * (5 - room), 1, name="other")) if room < 5 else None
    kv.drain_transfers()
    before = kv.usage()
    counts = kv.resume(sequences)
    if room < 5:
        assert counts is None
        assert kv.usage() == before
        assert kv.drain_transfers() == []
        assert other is not None
        kv.close(other)
        counts = kv.resume(sequences)
    assert counts == [10, 10, 10]
    assert kv.usage().free == 0
    tables = [blocks(kv, sequence) for sequence in sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    kv.check()


def test_a_suspended_copy_can_be_closed() -> None:
    kv = pool(4, host_blocks=4)
    lead, child = family(kv, 10, n=2)
    assert kv.suspend([lead, child])
    kv.close(lead)
    assert kv.usage().host == 12
    kv.close(child)
    assert kv.usage().host == 0
    kv.check()


def test_a_member_alone_can_come_back() -> None:
    """The rest of its group stays on the host, with all it shares."""
    kv = pool(8, host_blocks=4)
    lead, child = family(kv, 10, n=2)
    assert kv.suspend([lead, child])
    assert kv.resume([child]) == [10]
    assert kv.usage().host == 12
    assert kv.resume([lead]) == [10]
    assert kv.usage().host == 0
    kv.check()


# -------------------------------------------------------------- events and errors


def test_events_name_blocks_and_owners_and_only_while_observed() -> None:
    kv = pool(8)
    start(kv, request(4, 1, name="unseen"))
    assert kv.drain_events() == []
    kv.observed = True
    lead = start(kv, request(6, 8, n=2))
    child = fork(kv, lead)
    compute(kv, child, 7)
    assert kv.drain_events() == [
        BlockEvent("taken", 4, 4, "r/0"),
        BlockEvent("taken", 8, 4, "r/0"),
        BlockEvent("taken", 4, 4, "r/1"),
        BlockEvent("taken", 8, 4, "r/1"),
        BlockEvent("released", 8, 4, "r/1"),
        BlockEvent("taken", 12, 4, "r/1"),
    ]
    assert kv.drain_events() == []


def test_a_failed_steps_transfers_come_first_in_the_next_plan() -> None:
    kv = pool(8)
    lead, second, _ = family(kv, 10, n=3)
    compute(kv, second, 11)
    lost = kv.drain_transfers()
    compute(kv, lead, 11)
    kv.requeue(tuple(lost))
    assert kv.drain_transfers() == [Transfer("copy", 8, 12, 4), Transfer("copy", 8, 16, 4)]


def test_committing_more_than_was_reserved_is_an_error() -> None:
    kv = pool(4)
    lead = start(kv, request(4, 4))
    with pytest.raises(PluginContractError, match="5 positions were committed, the sequence holds 1 blocks of 4"):
        kv.commit(lead, 5)


def test_the_descriptor_says_what_a_kernel_must_read() -> None:
    assert PAGED.layout == PagedAllocator.layout == "block_table"
    with pytest.raises(TypeError, match="no regions"):
        pool(1).region(request(1, 1).sequences[0])


def spoil_filled(kv: PagedAllocator, lead: Sequence) -> None:
    kv._num_filled += 1


def spoil_block(kv: PagedAllocator, lead: Sequence) -> None:
    kv._filled[1] = 1


def spoil_free_block(kv: PagedAllocator, lead: Sequence) -> None:
    kv._filled[3] = 1


def spoil_refs(kv: PagedAllocator, lead: Sequence) -> None:
    kv._pool.refs[0] = 2


def spoil_table(kv: PagedAllocator, lead: Sequence) -> None:
    kv.table(lead)
    kv._tables[lead].array[0] = 3


def spoil_order(kv: PagedAllocator, lead: Sequence) -> None:
    kv._tables[lead].blocks[1] = kv._tables[lead].blocks[0]
    kv._pool.refs[0] = 2
    kv._pool.release(1)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_filled, "7 slots are counted as filled, the blocks hold 6"),
        (spoil_block, "block 1 counts 1 filled slots, its holders committed 2"),
        (spoil_free_block, "block 3 counts 1 filled slots, its holders committed 0"),
        (spoil_refs, "block 0 counts 2 references, 1 hold it"),
        (spoil_table, r"'r/0': the array says \[3 1\], not \[0, 1\]"),
        (spoil_order, r"'r/0' has a block twice: \[0, 0\]"),
    ],
)
def test_check_says_what_is_wrong(spoil: Callable[[PagedAllocator, Sequence], None], text: str) -> None:
    kv = pool(4)
    lead = start(kv, request(6, 4))
    kv.check()
    spoil(kv, lead)
    with pytest.raises(PluginContractError, match=text):
        kv.check()


class Witness(Shelf):
    """Keeps nothing, but remembers what was to be overwritten."""

    def __init__(self) -> None:
        self.overwritten: list[int] = []

    def overwrite(self, block: int) -> None:
        self.overwritten.append(block)


def test_a_shelf_hears_of_every_block_that_is_written_in_place() -> None:
    """A prefix cache must forget such a block's old content; a copy is a new block, of which it knows nothing."""
    shelf = Witness()
    kv = PagedAllocator(capacity=32, block_size=4, shelf=shelf)
    lead, child = family(kv, 6, n=2)
    compute(kv, child, 7)
    assert shelf.overwritten == []
    compute(kv, lead, 7)
    compute(kv, lead, 12)
    assert shelf.overwritten == [1, 1]


def test_sequences_can_be_opened_on_blocks_that_others_filled() -> None:
    """The way in for cached prefixes: shared by count, filled, and read from the first entry."""
    kv = pool(4)
    lead = start(kv, request(8, 4))
    other = request(10, 4, name="other").sequences[0]
    kv.adopt(other, blocks(kv, lead), 8)
    assert kv.table(other)[1] == 0
    kv.close(lead)
    assert (kv.usage().filled, kv.usage().free) == (8, 8)
    assert kv.reserve(other, 8, 10)
    assert blocks(kv, other) == [0, 1, 2]
    kv.check()

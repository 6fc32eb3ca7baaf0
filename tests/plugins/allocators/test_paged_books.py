"""Paged allocation: events, errors, the check of the books, and the seat of a prefix cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.core.errors import PluginContractError
from octavo.core.kv import BlockEvent
from octavo.core.plan import Transfer
from octavo.core.request import Sequence
from octavo.plugins.allocators.block_pool import Shelf
from octavo.plugins.allocators.paged import PAGED
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from tests.plugins.allocators.memory import blocks, compute, family, fork, request, start


def pool(num_blocks: int, *, block_size: int = 4, host_blocks: int = 0) -> PagedAllocator:
    return PagedAllocator(capacity=num_blocks * block_size, block_size=block_size, host_capacity=host_blocks * block_size)


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
        BlockEvent("released", 8, 4, "r/1", filled=2),
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
    kv._pool.share(0)
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


@pytest.mark.parametrize("stop", [7, 9])
def test_a_shelf_hears_of_every_full_block_that_is_written_in_place(stop: int) -> None:
    """A prefix cache must forget its old content. One that is not full it does not know, and a copy is a new block."""
    shelf = Witness()
    kv = PagedAllocator(capacity=32, block_size=4, shelf=shelf)
    lead, child = family(kv, 6, n=2)
    compute(kv, child, 7)
    compute(kv, lead, 7)
    compute(kv, lead, 8)
    assert shelf.overwritten == []
    late = Sequence("r/2", lead.request, 2, output=[1])
    kv.fork(lead, late, 6)
    late.num_computed = late.num_scheduled = 6
    kv.close(lead)
    compute(kv, late, stop)
    assert shelf.overwritten == [1]


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

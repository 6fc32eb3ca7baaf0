"""Reference counts, the order of blocks, and the seat of a prefix cache."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest

from octavo.core.errors import PluginContractError
from octavo.plugins.allocators.block_pool import BlockPool, Shelf


def test_a_block_is_free_when_its_last_reference_is_gone() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.share(first)
    assert not pool.release(first)
    assert (pool.live, pool.free) == (2, 1)
    assert pool.release(first)
    assert pool.release(second)
    assert (pool.live, pool.free) == (0, 3)


def test_what_sharing_saves_is_references_beyond_the_first() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    assert pool.saved == 0
    pool.share(first)
    pool.share(first)
    pool.share(second)
    assert pool.saved == 3
    pool.release(first)
    pool.release(second)
    assert pool.saved == 1
    pool._num_refs += 1
    with pytest.raises(PluginContractError, match="4 references are counted in all, there are 3"):
        pool.check(Counter({first: 2, second: 1}))


def test_the_last_to_come_back_is_the_first_to_go_out() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.release(1)
    assert pool.take(2) == [1, 3]


def test_a_double_free_raises() -> None:
    """Fault 16."""
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release(block)
    with pytest.raises(PluginContractError, match="block 0 was given back but nobody holds it: freed twice"):
        pool.release(block)
    pool.check(Counter())


def test_taking_too_many_and_sharing_a_free_block_raise() -> None:
    pool = BlockPool(2)
    with pytest.raises(PluginContractError, match="3 blocks were taken, 2 of 2 are available"):
        pool.take(3)
    with pytest.raises(PluginContractError, match="block 1 was shared, but nobody holds it"):
        pool.share(1)
    pool.check(Counter())


def test_check_counts_from_scratch() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(PluginContractError, match="block 0 counts 1 references, 2 hold it"):
        pool.check(Counter({0: 2}))
    pool._free.append(0)
    with pytest.raises(PluginContractError, match=r"blocks \[0\] are in the free list but held"):
        pool.check(Counter({0: 1}))
    pool._free = [1]
    with pytest.raises(PluginContractError, match="1 free, 0 shelved and 1 held blocks are not the pool's 3"):
        pool.check(Counter({0: 1}))
    pool._free = [1, 1]
    with pytest.raises(PluginContractError, match="a block is in the free list twice"):
        pool.check(Counter({0: 1}))


class Keeper(Shelf):
    """Keeps even blocks and gives the oldest up."""

    def __init__(self) -> None:
        self.kept: OrderedDict[int, None] = OrderedDict()
        self.overwritten: list[int] = []

    def __len__(self) -> int:
        return len(self.kept)

    def keep(self, block: int) -> bool:
        if block % 2 == 0:
            self.kept[block] = None
        return block % 2 == 0

    def evict(self) -> int:
        return self.kept.popitem(last=False)[0]

    def reuse(self, block: int) -> None:
        del self.kept[block]

    def overwrite(self, block: int) -> None:
        self.overwritten.append(block)


def test_a_shelf_keeps_blocks_that_count_as_available_and_go_after_the_free_ones() -> None:
    shelf = Keeper()
    pool = BlockPool(4, shelf)
    for block in pool.take(4):
        pool.release(block)
    assert (pool.free, pool.shelved, pool.available, pool.live) == (2, 2, 4, 0)
    pool.check(Counter())
    pool.share(2)  # pinned: nobody may take it now
    assert (pool.shelved, pool.live) == (1, 1)
    assert pool.take(3) == [3, 1, 0]
    assert (pool.free, pool.shelved) == (0, 0)
    pool.overwrite(0)
    assert shelf.overwritten == [0]
    pool.check(Counter([0, 1, 2, 3]))

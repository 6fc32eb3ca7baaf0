"""Which block is given up next: ends before beginnings, what cannot be found before all, then by policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from octavo.core.errors import PluginContractError
from octavo.plugins.allocators.block_pool import BlockPool
from octavo.plugins.allocators.prefix.cache import Entry, PrefixCache


class Shop:
    """A pool with a cache; prefixes are words, a block a letter."""

    def __init__(self, num_blocks: int, eviction: str = "lru") -> None:
        self.cache = PrefixCache(num_blocks, eviction=eviction, tell=lambda kind, block, key: None)
        self.pool = BlockPool(num_blocks, self.cache)

    def compute(self, word: str) -> list[int]:
        """Share what is there, take and register the rest; the blocks stay held."""
        held: list[int] = []
        parent: Entry | None = None
        for end in range(1, len(word) + 1):
            entry = self.cache.entries.get(word[:end].encode())
            if entry is None:
                (block,) = self.pool.take(1)
                entry = self.cache.register(word[:end].encode(), block, parent=parent, tokens=b"", extras=())
            else:
                self.pool.share(entry.block)
                entry.hits += 1
            held.append(entry.block)
            parent = entry
        return held

    def leave(self, held: list[int]) -> None:
        for block in reversed(held):
            self.pool.release(block)

    def use(self, *words: str) -> None:
        for word in words:
            self.leave(self.compute(word))

    def order(self) -> list[str]:
        """What goes, from now on, in which order."""
        gone = []
        while self.pool.shelved:
            before = set(self.cache.entries)
            self.pool._free.append(self.cache.evict())
            gone.append(" ".join(sorted(key.decode() for key in before - set(self.cache.entries))))
            self.cache.check(live={block for block, refs in enumerate(self.pool.refs) if refs})
        return gone


@pytest.mark.parametrize(
    ("eviction", "order"),
    [
        ("lru", ["bcd", "bc", "b", "axy", "ax", "abc", "ab", "a"]),  # when they were used last: bcd, axy, abc
        ("lfu", ["bcd", "bc", "b", "abc", "ab", "axy", "ax", "a"]),  # how often they were found: never, once, twice
        ("fifo", ["abc", "ab", "axy", "ax", "a", "bcd", "bc", "b"]),
    ],
)
def test_policies_take_ends_before_beginnings(eviction: str, order: list[str]) -> None:
    """Fault 5."""
    shop = Shop(16, eviction)
    shop.use("abc", "axy", "bcd", "axy", "axy", "abc")
    assert shop.order() == order


def test_the_least_recently_used_is_the_first_to_come_back_not_the_oldest() -> None:
    shop = Shop(4)
    shop.use("a", "b", "a")
    assert shop.order() == ["b", "a"]


def test_a_block_in_use_is_never_given_up() -> None:
    shop = Shop(3)
    held = shop.compute("ab")
    shop.use("c")
    assert shop.order() == ["c"]
    with pytest.raises(PluginContractError, match="a block was to be evicted, but none is kept for reuse"):
        shop.cache.evict()
    shop.leave(held)
    assert shop.order() == ["ab", "a"]


def test_a_free_block_goes_before_any_that_is_kept() -> None:
    shop = Shop(4)
    shop.use("abc")
    assert len(shop.pool.take(1)) == 1
    assert shop.cache.evictions == 0
    assert len(shop.cache.entries) == 3


def test_what_follows_a_forgotten_block_cannot_be_found_and_goes_first() -> None:
    shop = Shop(8)
    shop.use("x", "abcd")
    (block,) = [entry.block for key, entry in shop.cache.entries.items() if key == b"ab"]
    shop.pool.share(block)
    shop.pool.overwrite(block)
    assert set(shop.cache.entries) == {b"a", b"x"}
    assert shop.pool.shelved == 4
    assert shop.order() == ["", "", "x", "a"]
    assert shop.cache.evictions == 2


def test_a_beginning_goes_with_its_end_in_use_only_if_nothing_else_is_left() -> None:
    """Two computed `a` at once; the one who has it registered leaves, the other goes on with its own copy and registers `ab`."""
    shop = Shop(4)
    first = shop.compute("a")
    copy, tail = shop.pool.take(2)
    shop.cache.register(b"ab", tail, parent=shop.cache.entries[b"a"], tokens=b"", extras=())
    shop.leave(first)
    shop.use("z")
    assert shop.order() == ["z", "a ab"]
    assert shop.pool.release(tail)
    assert shop.pool.release(copy)
    assert shop.pool.free == 4
    shop.pool.check(Counter())


def test_the_queue_stays_as_small_as_the_pool() -> None:
    """However often what is kept is found, forgotten and computed anew."""
    shop = Shop(4)
    for round in range(100):
        shop.use("ab")
        held = shop.compute("ab")
        if round % 2:
            shop.cache.overwrite(held[0])
        shop.leave(held)
        assert len(shop.cache._queue) <= 9
    shop.cache.check(live=set())


def test_evicted_keys_are_remembered_for_a_while() -> None:
    """As many as the pool has blocks, the last ones."""
    shop = Shop(2)
    shop.use("a", "b", "c", "d", "e")
    assert list(shop.cache.recent) == [b"b", b"c"]
    shop.cache.clear()
    assert not shop.cache.recent
    assert not shop.cache.entries
    assert shop.pool.shelved == 2


def spoil_parent(shop: Shop) -> None:
    shop.cache.entries[b"ab"].parent = Entry(b"a", 0, 0, None, b"", (), 0)


def spoil_children(shop: Shop) -> None:
    shop.cache.entries[b"a"].num_children += 1


def spoil_block(shop: Shop) -> None:
    shop.cache._by_block[0] = None


def spoil_shelf(shop: Shop) -> None:
    shop.cache.entries[b"ab"].shelved = False


def spoil_queue(shop: Shop) -> None:
    shop.cache._queue.clear()


def spoil_count(shop: Shop) -> None:
    shop.cache._num_shelved += 1


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_parent, "the 1th of its prefix, cannot be found: the block before it is gone"),
        (spoil_children, "2 blocks after block 0 are counted, not 1"),
        (spoil_block, "the entries by block and by key are not the same"),
        (spoil_shelf, "the 1th of its prefix, is neither in use nor kept"),
        (spoil_queue, "the 1th of its prefix, would never be given up"),
        (spoil_count, "3 blocks are counted as kept"),
    ],
)
def test_check_says_what_is_wrong(spoil: Callable[[Shop], None], text: str) -> None:
    shop = Shop(4)
    shop.use("ab")
    shop.cache.check(live=set())
    spoil(shop)
    with pytest.raises(PluginContractError, match=text):
        shop.cache.check(live=set())

"""Full blocks by their key: which can be found, and which is given up next.

Entries form a tree: an entry's parent is the block before it. An entry whose parent is gone could never be found again, so whoever is
forgotten takes its descendants along, and what is given up are leaves: the end of a prefix before its beginning. Entries are many and
come while rows decode, so that they count their children and don't list them: who they are is asked when a beginning is forgotten, rarely.
Must not know: sequences, how a key is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Literal

from octavo.core.errors import PluginContractError
from octavo.plugins.allocators.block_pool import Shelf

Extras = tuple[tuple[str, str], ...]
Tell = Callable[[Literal["cached", "evicted"], int, bytes], None]


@dataclass(eq=False, slots=True)
class Entry:
    """A full block that can be found. `shelved`: nobody refers to it, it is kept for reuse."""

    key: bytes
    block: int
    index: int  # of the block in its sequence
    parent: Entry | None
    tokens: bytes  # the block's token ids, packed
    extras: Extras  # what else must agree
    born: int
    num_children: int = 0
    hits: int = 0
    kept_at: int = 0  # when its last reference went
    shelved: bool = False
    queued: bool = False
    forgotten: bool = False  # it cannot be found any more


POLICIES: dict[str, Callable[[Entry], tuple[int, ...]]] = {
    "lru": lambda entry: (entry.kept_at,),
    "lfu": lambda entry: (entry.hits, entry.kept_at),
    "fifo": lambda entry: (entry.born,),
}
"""What shelved leaves are ordered by; the least goes first. It may only rise as time goes by."""


class PrefixCache(Shelf):
    """Entries by key and by block, and the order in which they go.

    `recent` remembers the keys that were evicted last, as many as the pool has blocks, to explain a miss.
    """

    def __init__(self, num_blocks: int, *, eviction: str, tell: Tell, look: Callable[[], None] = lambda: None) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.recent: dict[bytes, None] = {}
        self.evictions = 0
        self.observed = False  # somebody wants to be told
        self._by_block: list[Entry | None] = [None] * num_blocks
        self._priority = POLICIES[eviction]
        self._tell = tell
        self._look = look  # what is about to be entered comes first
        self._queue: list[tuple[tuple[int, ...], int, Entry]] = []  # shelved leaves are in it; others may be
        self._num_shelved = 0
        self._orphans: list[int] = []  # kept blocks that cannot be found any more
        self._time = count(1)

    def __len__(self) -> int:
        """Blocks that nobody refers to."""
        return self._num_shelved + len(self._orphans)

    def entry_of(self, block: int) -> Entry | None:
        """What can be found in this block."""
        return self._by_block[block]

    def register(self, key: bytes, block: int, *, parent: Entry | None, tokens: bytes, extras: Extras) -> Entry:
        """A live block is full and computed: it may be found under its key, which nobody has."""
        entry = Entry(key, block, parent.index + 1 if parent else 0, parent, tokens, extras, next(self._time))
        if parent is not None:
            parent.num_children += 1
        self.entries[key] = self._by_block[block] = entry
        if self.observed:
            self._tell("cached", block, key)
        return entry

    # ------------------------------------------------------- as the pool's shelf

    def keep(self, block: int) -> bool:
        """What can be found stays."""
        entry = self._by_block[block]
        if entry is None:
            return False
        entry.kept_at = next(self._time)
        entry.shelved = True
        self._num_shelved += 1
        if not entry.num_children:
            self._enqueue(entry)
        return True

    def reuse(self, block: int) -> None:
        """Pinned: it is not given up while somebody refers to it."""
        entry = self._by_block[block]
        if entry is None or not entry.shelved:
            raise PluginContractError(f"block {block} was shared, but nobody holds it and it is not kept for reuse")
        entry.shelved = False
        self._num_shelved -= 1

    def overwrite(self, block: int) -> None:
        """Its one holder is about to write something else into it."""
        self._look()
        entry = self._by_block[block]
        if entry is not None:
            self._forget(entry)

    def evict(self) -> int:
        """What cannot be found goes first, then the least wanted leaf."""
        if self._orphans:
            return self._orphans.pop()
        entry = self._least_wanted()
        self.reuse(entry.block)
        self._forget(entry)
        self.evictions += 1
        self.recent.pop(entry.key, None)
        self.recent[entry.key] = None
        if len(self.recent) > len(self._by_block):
            del self.recent[next(iter(self.recent))]
        return entry.block

    def clear(self) -> None:
        """Nothing can be found any more. That is no eviction."""
        for entry in list(self.entries.values()):
            self._drop(entry)
        self._queue.clear()
        self.recent.clear()

    # ------------------------------------------------------------------- inside

    def _enqueue(self, entry: Entry) -> None:
        if entry.queued:
            return
        if len(self._queue) >= 2 * len(self._by_block):  # entries that were forgotten while they stood in it
            self._queue = [item for item in self._queue if self._by_block[item[2].block] is item[2]]
            heapify(self._queue)
        entry.queued = True
        heappush(self._queue, (self._priority(entry), entry.born, entry))

    def _least_wanted(self) -> Entry:
        """The first shelved leaf. Others leave the queue as they come up, and those that rose since they entered it go back."""
        queue = self._queue
        while queue:
            priority, _, entry = queue[0]
            if not entry.shelved or entry.num_children:
                heappop(queue)
                entry.queued = False
            elif self._priority(entry) > priority:
                heapreplace(queue, (self._priority(entry), entry.born, entry))
            else:
                heappop(queue)
                entry.queued = False
                return entry
        # Each has a child in use: two sequences computed the same prefix at once, and the one whose blocks are found left first.
        shelved = [entry for entry in self.entries.values() if entry.shelved]
        if not shelved:
            raise PluginContractError("a block was to be evicted, but none is kept for reuse")
        return max(shelved, key=lambda entry: entry.index)

    def _forget(self, entry: Entry) -> None:
        """Neither the entry nor what follows it can be found any more."""
        parent = entry.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.shelved and not parent.num_children:
                self._enqueue(parent)
        family = {entry: None}
        if entry.num_children:
            for other in self.entries.values():  # in the order of their coming: a parent before its children
                if other.parent in family:
                    family[other] = None
        for gone in family:
            self._drop(gone)

    def _drop(self, entry: Entry) -> None:
        """One entry less; if its block is kept, for nothing now."""
        entry.parent, entry.num_children, entry.forgotten = None, 0, True
        del self.entries[entry.key]
        self._by_block[entry.block] = None
        if entry.shelved:
            entry.shelved = False
            self._num_shelved -= 1
            self._orphans.append(entry.block)
        if self.observed:
            self._tell("evicted", entry.block, entry.key)

    def check(self, live: set[int]) -> None:
        """`live` are the blocks that somebody refers to. Raises PluginContractError where the books differ."""
        found = [entry for entry in self._by_block if entry is not None]
        if set(found) != set(self.entries.values()) or any(self.entries.get(entry.key) is not entry for entry in found):
            raise PluginContractError("prefix: the entries by block and by key are not the same")
        queued = {entry for _, _, entry in self._queue if entry.queued}
        for entry in found:
            where = f"prefix: block {entry.block}, the {entry.index}th of its prefix,"
            if entry.shelved == (entry.block in live):
                raise PluginContractError(f"{where} is {'kept for reuse and in use' if entry.shelved else 'neither in use nor kept'}")
            if entry.parent is not None and self.entries.get(entry.parent.key) is not entry.parent:
                raise PluginContractError(f"{where} cannot be found: the block before it is gone")
            if entry.shelved and not entry.num_children and entry not in queued:
                raise PluginContractError(f"{where} would never be given up")
        children = Counter(entry.parent for entry in found)
        for entry in found:
            if entry.num_children != children[entry]:
                raise PluginContractError(
                    f"prefix: {entry.num_children} blocks after block {entry.block} are counted, not {children[entry]}"
                )
        if len(self._queue) > 2 * len(self._by_block) + 1:
            raise PluginContractError(f"prefix: {len(self._queue)} queued for {len(found)} entries")
        if self._num_shelved != sum(entry.shelved for entry in found) or live & set(self._orphans):
            raise PluginContractError(f"prefix: {self._num_shelved} blocks are counted as kept, orphans are {self._orphans}")

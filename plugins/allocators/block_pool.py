"""Blocks of equal size with reference counts: what a paged allocator takes from, on the device and in host memory.

Must not know: sequences, what a block holds, how large it is.
"""

from __future__ import annotations

from collections import Counter

from octavo.core.errors import PluginContractError


class Shelf:
    """Where blocks go that nobody refers to, but whose content may be wanted again.

    This one keeps nothing. A prefix cache derives from it and overrides all of it.
    """

    def __len__(self) -> int:
        """Blocks kept; each could be given up."""
        return 0

    def keep(self, block: int) -> bool:
        """The block's last reference is gone. True: it stays here; False: it is free."""
        return False

    def evict(self) -> int:
        """Give one block up, the least wanted."""
        raise PluginContractError("a block was to be evicted, but none is kept for reuse")

    def reuse(self, block: int) -> None:
        """A kept block is referred to again."""
        raise PluginContractError(f"block {block} was shared, but nobody holds it")

    def overwrite(self, block: int) -> None:
        """The one holder of this full block is about to write into it: nobody may find it by its old content.

        Not told of blocks that are not full: a shelf must not let anybody find those.
        """


class BlockPool:
    """Blocks 0 .. num_blocks - 1. The last to come back is the first to go out again; the shelf is asked when no free one is left."""

    def __init__(self, num_blocks: int, shelf: Shelf | None = None) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._num_refs = 0  # their sum
        self._free = list(range(num_blocks))[::-1]
        self._shelf = Shelf() if shelf is None else shelf  # an empty one is false

    @property
    def free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def shelved(self) -> int:
        """Blocks that nobody refers to, kept for reuse."""
        return len(self._shelf)

    @property
    def available(self) -> int:
        """Blocks that can be taken: free and shelved."""
        return len(self._free) + len(self._shelf)

    @property
    def live(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.available

    @property
    def saved(self) -> int:
        """References beyond the first: blocks that would be taken besides if nobody shared."""
        return self._num_refs - self.live

    def take(self, count: int) -> list[int]:
        """`count` blocks, at most `available`, with one reference each."""
        if count > self.available:
            raise PluginContractError(f"{count} blocks were taken, {self.available} of {self.num_blocks} are available")
        blocks = [self._free.pop() if self._free else self._shelf.evict() for _ in range(count)]
        for block in blocks:
            self.refs[block] = 1
        self._num_refs += count
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a live or shelved block."""
        if not self.refs[block]:
            self._shelf.reuse(block)
        self.refs[block] += 1
        self._num_refs += 1

    def release(self, block: int) -> bool:
        """One reference less; True if it was the last. Raises PluginContractError on a double free."""
        refs = self.refs[block]
        if refs <= 0:
            raise PluginContractError(f"block {block} was given back but nobody holds it: freed twice")
        self.refs[block] = refs - 1
        self._num_refs -= 1
        if refs > 1:
            return False
        if not self._shelf.keep(block):
            self._free.append(block)
        return True

    def overwrite(self, block: int) -> None:
        """The one holder of this full block is about to write into it."""
        self._shelf.overwrite(block)

    def empty_shelf(self) -> None:
        """Give up everything that is kept for reuse."""
        while len(self._shelf):
            self._free.append(self._shelf.evict())

    def check(self, holders: Counter[int]) -> None:
        """`holders` counts the references to each block from scratch. Raises PluginContractError where the books differ."""
        for block, refs in enumerate(self.refs):
            if refs != holders[block]:
                raise PluginContractError(f"block {block} counts {refs} references, {holders[block]} hold it")
        if self._num_refs != holders.total():
            raise PluginContractError(f"{self._num_refs} references are counted in all, there are {holders.total()}")
        idle = set(self._free)
        if len(idle) != len(self._free):
            raise PluginContractError(f"a block is in the free list twice: {sorted(self._free)}")
        held = sorted(block for block in idle if self.refs[block])
        if held:
            raise PluginContractError(f"blocks {held} are in the free list but held")
        if len(idle) + self.shelved + len(+holders) != self.num_blocks:
            raise PluginContractError(
                f"{len(idle)} free, {self.shelved} shelved and {len(+holders)} held blocks are not the pool's {self.num_blocks}"
            )

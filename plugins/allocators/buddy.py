"""Places regions by halving: every region takes a power of two of slots, and two free halves become one again (Knowlton, 1965).

This is what the PagedAttention paper assumes for its contiguous baselines. Must not know: sequences, requests, tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from octavo.core.errors import PluginContractError


def next_power_of_two(number: int) -> int:
    """The least power of two that is `number` >= 1 or more."""
    return 1 << (number - 1).bit_length()


class Buddy:
    """A pool that is no power of two starts as several, the largest first, so that a block's start is a multiple of its size.

    `rounding`: slots that regions hold beyond their length.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity  # slots, in whatever blocks
        self.rounding = 0
        self._free: list[list[int]] = [[] for _ in range(capacity.bit_length())]  # by size 2 ** k: starts of free blocks, sorted
        self._taken: dict[int, int] = {}  # start of a region: its length
        start = 0
        for k in reversed(range(capacity.bit_length())):
            if capacity >> k & 1:
                self._free[k].append(start)
                start += 1 << k
        self._roots = {(starts[0], k) for k, starts in enumerate(self._free) if starts}

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Free blocks as (start, length)."""
        return sorted((start, 1 << k) for k, starts in enumerate(self._free) for start in starts)

    def size(self, length: int) -> int:
        """Slots that a region of this length takes."""
        return next_power_of_two(length)

    def fits(self, lengths: Iterable[int]) -> bool:
        """An empty pool has room for regions of all these lengths at once.

        While nothing is given back, no two free blocks are of one size, so whatever there are slots for finds a block.
        """
        return sum(map(next_power_of_two, lengths)) <= self.capacity

    def take(self, length: int) -> int | None:
        """The start of a region of `length` >= 1 slots, from the smallest block that is large enough; None: there is none."""
        want = (length - 1).bit_length()
        k = next((k for k in range(want, len(self._free)) if self._free[k]), None)
        if k is None:
            return None
        start = self._free[k].pop(0)
        while k > want:
            k -= 1
            insort(self._free[k], start + (1 << k))
        self._taken[start] = length
        self.free -= 1 << want
        self.rounding += (1 << want) - length
        return start

    def give(self, start: int, length: int) -> None:
        """Take a region back. Raises PluginContractError if it isn't one that was taken."""
        if self._taken.get(start) != length:
            raise PluginContractError(f"slots {start}..{start + length - 1} were given back but are free already, or no region")
        del self._taken[start]
        k = (length - 1).bit_length()
        self.free += 1 << k
        self.rounding -= (1 << k) - length
        while (start, k) not in self._roots:
            other, starts = start ^ (1 << k), self._free[k]
            at = bisect_left(starts, other)
            if at == len(starts) or starts[at] != other:
                break
            del starts[at]
            start = min(start, other)
            k += 1
        insort(self._free[k], start)

    def check(self, regions: Iterable[tuple[int, int]]) -> None:
        """These regions, rounded up, and the free blocks cover all slots exactly once, else PluginContractError."""
        held = list(regions)
        if dict(held) != self._taken or len(held) != len(self._taken):
            raise PluginContractError(f"regions {sorted(held)} are held, {sorted(self._taken.items())} were taken")
        at = 0
        for start, length in sorted([*((start, next_power_of_two(length)) for start, length in held), *self.runs]):
            if start != at or start % length:
                raise PluginContractError(f"block {start}..{start + length - 1} does not follow slot {at - 1}, or is not aligned")
            at += length
        if at != self.capacity:
            raise PluginContractError(f"regions and free blocks cover {at} slots of {self.capacity}")
        counted = (self.capacity - sum(next_power_of_two(length) for _, length in held), sum(next_power_of_two(n) - n for _, n in held))
        if (self.free, self.rounding) != counted:
            raise PluginContractError(f"{self.free} free slots and {self.rounding} lost to rounding are counted, there are {counted}")

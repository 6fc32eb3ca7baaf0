"""Places regions in a row of slots: the first free run that is long enough. Also hands out host memory.

Must not know: sequences, requests, tensors.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

from octavo.core.errors import PluginContractError


class FirstFit:
    """Free runs of `capacity` slots, sorted by start; neighbours are merged as they come back, so no two runs touch."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity  # slots, in whatever runs
        self.rounding = 0  # slots that regions hold beyond their length: none
        self._starts = [0] if capacity else []
        self._lengths = [capacity] if capacity else []

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Free runs as (start, length)."""
        return list(zip(self._starts, self._lengths, strict=True))

    def size(self, length: int) -> int:
        """Slots that a region of this length takes."""
        return length

    def fits(self, lengths: Iterable[int]) -> bool:
        """An empty pool has room for regions of all these lengths at once."""
        return sum(lengths) <= self.capacity

    def take(self, length: int) -> int | None:
        """The start of a region of `length` >= 1 slots; None: no run is long enough."""
        for i, run in enumerate(self._lengths):
            if run >= length:
                start = self._starts[i]
                if run == length:
                    del self._starts[i], self._lengths[i]
                else:
                    self._starts[i] += length
                    self._lengths[i] -= length
                self.free -= length
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Take a region back. Raises PluginContractError if any of its slots is free already, or none of the pool's."""
        i = bisect(self._starts, start)
        before = self._starts[i - 1] + self._lengths[i - 1] if i else 0  # end of the run on the left
        after = self._starts[i] if i < len(self._starts) else self.capacity
        if not before <= start < start + length <= after:
            raise PluginContractError(f"slots {start}..{start + length - 1} were given back but are free already, or outside the pool")
        self.free += length
        if i and before == start:
            i -= 1
            self._lengths[i] += length
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, length)
        if i + 1 < len(self._starts) and self._starts[i + 1] == start + length:
            self._lengths[i] += self._lengths[i + 1]
            del self._starts[i + 1], self._lengths[i + 1]

    def check(self, regions: Iterable[tuple[int, int]]) -> None:
        """These regions and the free runs cover all slots exactly once, else PluginContractError."""
        at = 0
        for start, length in sorted([*regions, *self.runs]):
            if start != at:
                what = "held or free twice" if start < at else "neither held nor free"
                raise PluginContractError(f"slots {min(start, at)}..{max(start, at) - 1} are {what}")
            at += length
        if at != self.capacity:
            raise PluginContractError(f"regions and free runs cover {at} slots of {self.capacity}")
        if self.free != sum(self._lengths):
            raise PluginContractError(f"{self.free} slots are counted as free, the runs hold {sum(self._lengths)}")

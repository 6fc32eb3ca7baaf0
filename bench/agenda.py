"""`Agenda`: which item of a `Work` is to be sent next, and when. Open loop: at its time. Closed loop: as soon as one of so many ends.

A conversation's next turn is due `pause` seconds after the answer to the turn before; in a closed loop it goes before new ones.
Must not know: how an item is sent, clocks: whoever asks brings the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from octavo.bench.work import Work


class Agenda:
    """Times are seconds after the run's start. `concurrency`: so many at once, whatever their `at` says; None: an open loop."""

    def __init__(self, work: Work, *, concurrency: int | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self._work = work
        self._free = concurrency  # seats; None: no limit
        self._freed: list[float] = [0.0] * (concurrency or 0)  # when each seat without a request lost its last one
        self._heap: list[tuple[bool, float, int]] = []  # opens a conversation, due, index
        self._followers: dict[int, list[int]] = {}
        for index, item in enumerate(work.items):
            if item.after is None:
                self._heap.append((self._closed, 0.0 if self._closed else item.at, index))
            else:
                self._followers.setdefault(item.after, []).append(index)
        heapq.heapify(self._heap)
        self._resting: list[tuple[float, int]] = []  # closed loop: later turns that are not due yet

    @property
    def _closed(self) -> bool:
        return self._free is not None

    def __bool__(self) -> bool:
        """Something waits for its time or a seat. Turns whose turn before is under way are not counted."""
        return bool(self._heap or self._resting)

    def followed(self, index: int) -> bool:
        """A later turn waits for this item's answer."""
        return index in self._followers

    def due(self, now: float) -> Iterator[tuple[int, float]]:
        """Items to be sent now, each with the time at which it should have been; each yielded one is taken to be sent."""
        while self._resting and self._resting[0][0] <= now:
            when, index = heapq.heappop(self._resting)
            heapq.heappush(self._heap, (False, when, index))
        while self._heap and self._heap[0][1] <= now and self._free != 0:
            _, when, index = heapq.heappop(self._heap)
            if self._free is not None:
                self._free -= 1
                when = max(when, heapq.heappop(self._freed))
            yield index, when

    @property
    def next_due(self) -> float | None:
        """When to ask again; None: not before something ends."""
        if self._free == 0:
            return None
        times = [entry[1] for entry in self._heap[:1]] + [entry[0] for entry in self._resting[:1]]
        return min(times, default=None)

    def ended(self, index: int, now: float, *, answered: bool) -> list[int]:
        """A sent item is over. Its later turns become due; without an answer they never can, and all of them are returned."""
        if self._free is not None:
            self._free += 1
            heapq.heappush(self._freed, now)
        followers = self._followers.pop(index, [])
        if not answered:
            return self._with_descendants(followers)
        for follower in followers:
            item = self._work.items[follower]
            when = now + item.pause
            if self._free is None:
                heapq.heappush(self._heap, (False, max(when, item.at), follower))
            else:
                heapq.heappush(self._resting, (when, follower))
        return []

    def _with_descendants(self, indices: list[int]) -> list[int]:
        found = list(indices)
        for index in found:
            found += self._followers.pop(index, [])
        return found

"""`Deadlines`: which requests are to be ended when.

Must not know: how a request is ended, clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from octavo.core.request import Request

SLACK = 64  # entries of ended requests that may lie in the heap, besides as many as there are live ones


class Deadlines:
    """A heap of the requests that have a deadline. Those that ended before leave it at their time, or when they become many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._live: set[Request] = set()

    def __len__(self) -> int:
        """Entries of live and of ended requests."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request; one without a deadline is none of our business."""
        if request.deadline is not None:
            self._live.add(request)
            heappush(self._heap, (request.deadline, request.order, request))

    def drop(self, request: Request) -> None:
        """The request is over."""
        self._live.discard(request)
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapify(self._heap)

    def expired(self, now: float) -> Iterator[Request]:
        """Live requests whose time has come, earliest first. They may be dropped on the way."""
        while (first := self.first) is not None and first <= now:
            request = heappop(self._heap)[2]
            self._live.discard(request)
            yield request

    @property
    def first(self) -> float | None:
        """When the next live request's time comes; None: never."""
        while self._heap and self._heap[0][2] not in self._live:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

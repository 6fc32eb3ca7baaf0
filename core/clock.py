"""Time, as the engine sees it. Nobody else in core calls `time`; tests and simulations bring a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never jump back, from an arbitrary start."""

    def now(self) -> float:
        """Seconds since the clock's start."""

    def sleep_until(self, when: float) -> None:
        """Return at `when` or soon after; at once if that has passed."""


class MonotonicClock:
    """The machine's monotonic clock: changes of the wall clock do not touch it."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.perf_counter()

    def sleep_until(self, when: float) -> None:
        """Sleep until `when`."""
        time.sleep(max(0.0, when - self.now()))


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Where the clock was last moved to."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds

    def sleep_until(self, when: float) -> None:
        """Jump to `when`."""
        self._now = max(self._now, when)

"""`Turns`: whoever calls into an engine takes a turn. One thread at a time, and Ctrl-C waits until the turn is over.

An engine's books (lists, counts, slots) are right between turns, not within one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from octavo.core.errors import EngineError


class Turns:
    """The turns of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def free(self) -> bool:
        """Nobody has a turn right now."""
        return not self._lock.locked()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Raises EngineError if somebody else has the turn, KeyboardInterrupt at the end if one came meanwhile (a second: at once)."""
        if not self._lock.acquire(blocking=False):
            raise EngineError("this engine is in use by another thread, or by whoever is just being told of a step: one at a time")
        try:
            with _interrupts_held():
                yield
        finally:
            self._lock.release()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # signals reach the main thread alone; and whoever has a handler of its own knows what it does
        return
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt

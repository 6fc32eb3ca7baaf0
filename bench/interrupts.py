"""A run that ends before its work is done keeps what was measured until then. Ctrl-C waits until the step is over.

Must not know: engines, HTTP.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Self

from octavo.bench.records import RequestRecord
from octavo.core.errors import EngineError


class RunInterrupted(KeyboardInterrupt):
    """A run that Ctrl-C ended. `records` has the requests that were answered, and as aborted those that were under way.

    It is a KeyboardInterrupt, so that a caller with more runs to do does not go on by mistake.
    """

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        super().__init__(f"interrupted: {sum(record.succeeded for record in records)} of {len(records)} requests sent have their answer")
        self.records = list(records)


class RunFailed(EngineError):
    """A run that its own side ended: an engine that fails step after step, or a fault of the client. `records` has its requests so far.

    Those that were under way have failed. What happened is this error's cause.
    """

    def __init__(self, records: Sequence[RequestRecord], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.records = list(records)


class HeldInterrupts:
    """In its `with` block Ctrl-C sets `came` and nothing else; a second one raises KeyboardInterrupt.

    Without effect in other threads than the main one, and where somebody else handles the signal.
    """

    def __init__(self) -> None:
        self.came = False
        self._sleeping = False
        self._installed = False

    def sleep(self, until: Callable[[float], None], when: float) -> None:
        """`until(when)`, which Ctrl-C cuts short."""
        try:
            self._sleeping = True
            until(when)
            self._sleeping = False
        except KeyboardInterrupt:
            self._sleeping = False
            self.came = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came or self._sleeping:
            raise KeyboardInterrupt
        self.came = True

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

"""Server-sent events out of the bytes of a stream, by the rules of https://html.spec.whatwg.org/multipage/server-sent-events.html.

Must not know: HTTP, what the events hold.
"""

from __future__ import annotations

import re

LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventReader:
    """Feed it what arrives. Comments and fields other than `data` are read over; so is an event that the stream's end cuts off."""

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not come
        self._data: list[bytes] = []  # of the event that is being read
        self._after_return = False  # the last line ended in a carriage return, whose newline may still come
        self._first = True

    def feed(self, piece: bytes) -> list[str]:
        """The data of each event that is whole by now; an event without data is none."""
        if self._after_return and piece:
            piece = piece.removeprefix(b"\n")
            self._after_return = False
        if not piece:
            return []
        self._after_return = piece.endswith(b"\r")
        *lines, self._rest = LINE_END.split(self._rest + piece)
        found = []
        for line in lines:
            if self._first:
                line, self._first = line.removeprefix(BYTE_ORDER_MARK), False
            if line:
                self._take(line)
            elif self._data:
                found.append(b"\n".join(self._data).decode("utf-8", errors="replace"))
                self._data = []
        return found

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has no name
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

"""Connections whose client takes for ever: one that never finishes its request, or never reads on in its answer, is closed.

uvicorn waits without end in both cases, and each would hold a socket, and the second also an answer. Must not know: routes, engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVING = (h11.IDLE, h11.SEND_BODY)  # states of a client that has not sent its whole request


class BoundedProtocol(H11Protocol):
    """uvicorn's, which knows since when it waits for its client."""

    waits_since: float | None = None  # on the event loop's clock; None: it is the server's turn, or between two requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client's turn."""
        super().connection_made(transport)
        self.waits_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """A part of a request, perhaps its last one."""
        if self.waits_since is None:
            self.waits_since = self.loop.time()
        super().data_received(data)
        if self.conn.their_state not in RECEIVING and not self.flow.write_paused:
            self.waits_since = None

    def pause_writing(self) -> None:
        """The client does not read as fast as the answer is made."""
        super().pause_writing()
        self.waits_since = self.loop.time()

    def resume_writing(self) -> None:
        """It reads on."""
        super().resume_writing()
        self.waits_since = None


def close_overdue(connections: Iterable[object], *, now: float, limit_s: float) -> int:
    """Hang up on whoever has kept the server waiting for longer; returns how many they were. What they asked for is aborted."""
    overdue = [
        connection
        for connection in list(connections)
        if isinstance(connection, BoundedProtocol) and connection.waits_since is not None and now - connection.waits_since > limit_s
    ]
    for connection in overdue:
        connection.transport.abort()
    return len(overdue)

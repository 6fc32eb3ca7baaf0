"""Answers to clients who may leave: a stream of server-sent events, or one answer, given up as soon as nobody listens any more.

Must not know: what is in the events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Answer = TypeVar("Answer")
DONE = b"data: [DONE]\n\n"


async def unless_gone(request: Request, work: Awaitable[Answer]) -> Answer | None:
    """Do the work unless the client hangs up before it is done: then it is cancelled, and the answer is None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _end(task, gone)


class EventStream(Response):
    """Sends events as they come. `events` yields whole events, in bytes, and ends by itself; leaving it ends the work behind it.

    `sources`: what that reads, to be ended even if the client has gone before the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], *, sources: Sequence[AsyncGenerator[Any]] = (), headers: dict[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        self._events = events
        self._sources = sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _end(sending, gone)
            for source in self._sources:
                await source.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

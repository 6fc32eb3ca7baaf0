"""What an engine's thread made for one request of `AsyncLLM`, until its reader takes it.

A reader who is slower than the engine gets its pieces joined, so that what waits for it stays small. Must not know: the engine, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from octavo.core.outputs import RequestOutput


class Mailbox:
    """What came for one request and was not read yet. Everything but `fail_from_engine` belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id: str | None = None
        self.left = False  # nobody reads any more
        self.finished = False
        self._loop = loop
        self._letters: list[RequestOutput] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """One more piece."""
        self._letters.append(output)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """No more will come."""
        self._error = error
        self._arrived.set()

    def fail_from_engine(self, error: Exception) -> None:
        """The same, from the engine's thread."""
        with suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
            self._loop.call_soon_threadsafe(self.fail, error)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while not self.finished:
            await self._arrived.wait()
            self._arrived.clear()
            letters, self._letters = self._letters, []
            for letter in joined(letters):
                self.finished = self.finished or letter.finished
                yield letter
            if self._error is not None and not self.finished:
                self.finished = True
                raise self._error


def joined(pieces: list[RequestOutput]) -> list[RequestOutput]:
    """Pieces of one request, as few as say the same: those of one sample in one."""
    if len(pieces) < 2 or not all(len(piece.outputs) == 1 for piece in pieces):
        return pieces
    first: dict[int, RequestOutput] = {}
    for piece in pieces:
        (new,) = piece.outputs
        if new.index not in first:
            first[new.index] = piece
            continue
        (old,) = first[new.index].outputs
        old.text += new.text
        old.token_ids += new.token_ids
        if old.logprobs is not None and new.logprobs is not None:
            old.logprobs += new.logprobs
        old.finish_reason, old.stop_reason, old.error = new.finish_reason, new.stop_reason, new.error
        old.cumulative_logprob = new.cumulative_logprob
    whole = list(first.values())
    whole[-1].finished, whole[-1].times = pieces[-1].finished, pieces[-1].times
    if len(whole) > 1 and pieces[-1].finished:
        for piece in whole[:-1]:
            piece.finished = False
    return whole

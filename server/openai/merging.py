"""Several streams as one, each piece as it comes.

Must not know: what is in the pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from octavo.core.outputs import RequestOutput

MOST_WAITING = 64  # pieces that nobody has read; then their streams wait, and join what comes


async def merged(firsts: list[RequestOutput], runs: list[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The pieces of all runs, each with the number of its run; of each the first was read already. Raises what any of them raises."""
    if len(runs) == 1:  # needs no task and no queue, which would cost a fifth of a stream
        async with aclosing(chained(firsts[0], runs[0])) as alone:
            async for only in alone:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | None, Exception | None]] = asyncio.Queue(MOST_WAITING)

    async def read(number: int) -> None:
        try:
            await queue.put((number, firsts[number], None))
            async for piece in runs[number]:
                await queue.put((number, piece, None))
            await queue.put((number, None, None))
        except Exception as error:
            await queue.put((number, None, error))

    async with AsyncExitStack() as stack:
        for run in runs:
            await stack.enter_async_context(aclosing(run))
        readers = [asyncio.ensure_future(read(number)) for number in range(len(runs))]
        stack.push_async_callback(_cancelled, readers)
        left = len(runs)
        while left:
            number, piece, error = await queue.get()
            if error is not None:
                raise error
            if piece is None:
                left -= 1
            else:
                yield number, piece


async def chained(first: RequestOutput, rest: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
    """A stream whose first piece was read already."""
    async with aclosing(rest) as pieces:
        yield first
        async for piece in pieces:
            yield piece


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

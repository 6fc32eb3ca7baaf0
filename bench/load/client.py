"""Sends requests to an OpenAI-compatible server and records when what came back. Nothing is interpreted before a run is over.

Must not know: engines, what the answers should be.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.load.http1 import Answer, BrokenAnswer, Connection, connect, post
from octavo.bench.load.sse import EventReader
from octavo.bench.load.workload import Ask


@dataclass(kw_only=True)
class Record:
    """One request and what became of it. Times are `time.perf_counter`'s."""

    ask: Ask
    due: float  # when it should have been sent
    sent: float  # before a connection was opened for it, and before a first try in vain: both are waiting for the server
    ended: float
    answer: Answer = field(default_factory=Answer)
    broken: str = ""  # why there is no whole answer
    num_retries: int = 0  # times it was sent again, since the server hung up on an idle connection

    @property
    def streamed(self) -> bool:
        """It came as events."""
        return self.answer.headers.get("content-type", "").startswith("text/event-stream")

    @cached_property
    def events(self) -> list[tuple[float, Any]]:
        """Of a stream: each event's content with the time at which it was whole. `[DONE]` is the string of that name.

        Raises ValueError for an event that is no JSON.
        """
        reader = EventReader()
        return [
            (when, "[DONE]" if data.strip() == "[DONE]" else json.loads(data))
            for when, piece in self.answer.pieces
            for data in reader.feed(piece)
            if data
        ]

    @cached_property
    def contents(self) -> list[Any]:
        """The JSON of the answer: one object, or that of all events."""
        if not self.streamed:
            return [json.loads(self.answer.body)] if self.answer.body else []
        return [content for _, content in self.events if content != "[DONE]"]

    @property
    def error(self) -> str:
        """Why it is no answer; empty if it is one. An error in mid-stream counts, and a stream without its end."""
        if self.broken:
            return self.broken
        for content in self.contents:
            if "error" in content:
                return f"{self.answer.status}: {content['error']['message']}"
        if self.answer.status != 200:
            return f"status {self.answer.status}"
        if self.streamed and (not self.events or self.events[-1][1] != "[DONE]"):
            return "the stream ended without [DONE]"
        return ""

    @property
    def texts(self) -> dict[int, str]:
        """The text of each choice."""
        texts: dict[int, str] = {}
        for content in self.contents:
            for choice in content.get("choices", ()):
                said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + said
        return texts

    @property
    def num_tokens(self) -> int:
        """Tokens made, as the server counts them: never from text."""
        return sum(int(content["usage"]["completion_tokens"]) for content in self.contents if content.get("usage"))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, as the server counts them."""
        return sum(int(content["usage"]["prompt_tokens"]) for content in self.contents if content.get("usage"))

    @property
    def token_times(self) -> list[float]:
        """Of a stream: when each event that brings something came. The first is the first token's."""
        return [when for when, content in self.events if content != "[DONE]" and any(map(_brings_something, content.get("choices", ())))]


def _brings_something(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("token_ids") or (choice.get("delta") or {}).get("content") or choice.get("finish_reason"))


class Pool:
    """Connections to one server, kept as long as it keeps them. `connect` opens one, or raises OSError."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._idle: list[Connection] = []

    async def open(self, count: int) -> None:
        """So many, for later. Raises OSError."""
        self._idle += await asyncio.gather(*(self._connect() for _ in range(count)))

    async def send(self, ask: Ask, request: bytes, *, due: float, timeout_s: float) -> Record:
        """One request, on a connection that is free or a new one; once more where the server hung up on a free one just then.

        It raises nothing for what the server does. `timeout_s` is for all of it, from before the connection is opened to the last byte.
        """
        return await _recorded(partial(self._answer, request), ask, due=due, timeout_s=timeout_s)

    async def _answer(self, request: bytes, record: Record) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
            try:
                return await self._on(connection, request, record)
            except (BrokenAnswer, OSError):
                if record.answer.status:
                    raise
            record.num_retries += 1
            break
        try:
            connection = await self._connect()
        except OSError as error:
            raise ConnectionError(f"no connection: {error.strerror or error}") from error
        await self._on(connection, request, record)

    async def _on(self, connection: Connection, request: bytes, record: Record) -> None:
        await _ask_on(connection, request, record)
        if connection.transport is not None and not connection.transport.is_closing():
            self._idle.append(connection)

    async def closed(self) -> None:
        """Hang up all that are free, and wait until their sockets are gone."""
        for connection in self._idle:
            await connection.closed()


async def send(connection: Connection, ask: Ask, request: bytes, *, due: float, timeout_s: float) -> Record:
    """One request on a connection that is free; it raises nothing for what the server does."""
    return await _recorded(partial(_ask_on, connection, request), ask, due=due, timeout_s=timeout_s)


async def _recorded(answer: Callable[[Record], Awaitable[None]], ask: Ask, *, due: float, timeout_s: float) -> Record:
    """What `answer` puts into the record, and when it was done or given up."""
    now = time.perf_counter()
    record = Record(ask=ask, due=due, sent=now, ended=now)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await answer(record)
    except (BrokenAnswer, OSError) as error:  # a timeout is an OSError
        record.broken = f"no whole answer within {timeout_s:g} s" if limit.expired() else str(error)
    record.ended = time.perf_counter()
    return record


async def _ask_on(connection: Connection, request: bytes, record: Record) -> None:
    try:
        record.answer = await connection.ask(request)
    except BaseException:  # given up too: nobody waits for the rest
        record.answer = connection.so_far
        connection.close()
        raise


async def run(asks: Sequence[Ask], url: str, *, clients: int, timeout_s: float = 600.0) -> list[Record]:
    """Send all, with so many connections, each at its time or as soon as one is free after it. Records come in the order of `asks`.

    Raises OSError where there is no server to begin with.
    """
    parts = urlsplit(url)
    todo = deque(enumerate((ask, post(ask.path, ask.encoded(), host=parts.netloc, headers=ask.headers)) for ask in asks))
    records: list[Record | None] = [None] * len(asks)
    pool = Pool(partial(connect, parts.hostname or "127.0.0.1", parts.port or 80))
    workers = min(clients, len(asks))
    await pool.open(workers)
    begun = time.perf_counter()

    async def work() -> None:
        while todo:
            number, (ask, request) = todo.popleft()
            due = begun + ask.at
            if (pause := due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            records[number] = await pool.send(ask, request, due=due, timeout_s=timeout_s)

    await asyncio.gather(*(work() for _ in range(workers)))
    await pool.closed()
    return [record for record in records if record is not None]

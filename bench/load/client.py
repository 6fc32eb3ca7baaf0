"""Sends requests to an OpenAI-compatible server and records when what came back. Nothing is interpreted before a run is over.

Must not know: engines, what the answers should be.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.load.http1 import Answer, BrokenAnswer, Connection, connect, post
from octavo.bench.load.workload import Ask


@dataclass(kw_only=True)
class Record:
    """One request and what became of it. Times are `time.perf_counter`'s."""

    ask: Ask
    due: float  # when it should have been sent
    sent: float
    ended: float
    answer: Answer
    broken: str = ""  # why there is no whole answer

    @property
    def streamed(self) -> bool:
        """It came as events."""
        return self.answer.headers.get("content-type", "").startswith("text/event-stream")

    @cached_property
    def events(self) -> list[tuple[float, Any]]:
        """Of a stream: each event's content with the time at which it was whole. `[DONE]` is the string of that name."""
        events: list[tuple[float, Any]] = []
        rest = b""
        for when, piece in self.answer.pieces:
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                data = event.removeprefix(b"data: ")
                events.append((when, "[DONE]" if data == b"[DONE]" else json.loads(data)))
        return events

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


async def run(asks: Sequence[Ask], url: str, *, clients: int, timeout_s: float = 600.0) -> list[Record]:
    """Send all, with so many connections, each at its time or as soon as one is free after it. Records come in the order of `asks`."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    todo = deque(enumerate((ask, post(ask.path, ask.encoded(), host=parts.netloc, headers=ask.headers)) for ask in asks))
    records: list[Record | None] = [None] * len(asks)
    opened = await asyncio.gather(*(connect(host, port) for _ in range(min(clients, len(asks)))))
    begun = time.perf_counter()

    async def work(connection: Connection) -> None:
        while todo:
            number, (ask, request) = todo.popleft()
            due = begun + ask.at
            if (pause := due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            if connection.transport is None or connection.transport.is_closing():
                connection = await connect(host, port)
            records[number] = await send(connection, ask, request, due=due, timeout_s=timeout_s)
        await connection.closed()

    await asyncio.gather(*(work(connection) for connection in opened))
    return [record for record in records if record is not None]


async def send(connection: Connection, ask: Ask, request: bytes, *, due: float, timeout_s: float) -> Record:
    """One request on a connection that is free; it raises nothing for what the server does."""
    sent, broken = time.perf_counter(), ""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await connection.ask(request)
    except TimeoutError:
        answer, broken = connection.so_far, f"no whole answer within {timeout_s:g} s"
        connection.close()
    except (BrokenAnswer, OSError) as error:
        answer, broken = connection.so_far, str(error)
    return Record(ask=ask, due=due, sent=sent, ended=time.perf_counter(), answer=answer, broken=broken)

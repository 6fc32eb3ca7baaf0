"""Clients as they are: some ask and read, some hang up, read slowly, send half of a request or nonsense. Each visit has a verdict.

A verdict is "" where the server did what it must: the right answer whole, or the right beginning of it, or the refusal that is due.
Must not know: engines, metrics.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from octavo.bench.load.books import Seen
from octavo.bench.load.client import Record, send
from octavo.bench.load.http1 import BrokenAnswer, Connection, connect, post
from octavo.bench.load.workload import Ask

PATH = "/v1/completions"
BOUND_S = 120.0  # an answer that takes longer is lost


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, how it is sampled, and the ids that it is answered with, as the offline engine gives them."""

    prompt: list[int]
    params: dict[str, Any]
    expected: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of one client."""

    kind: str
    case: Case
    max_tokens: int
    model: str
    rng: random.Random

    def ask(self, *, stream: bool, **fields: Any) -> Ask:
        """The request; its answer is recognised by its ids."""
        body = {"model": self.model, "prompt": self.case.prompt, "max_tokens": self.max_tokens, "ignore_eos": True, **self.case.params}
        return Ask(body | {"stream": stream, "return_token_ids": True} | fields, PATH)

    def verdict(self, record: Record, *, whole: bool = True) -> str:
        """Whether these are the tokens of this case, all of them or their beginning."""
        if whole and record.error:
            return f"no answer: {record.error}"
        made = [token for content in record.contents for choice in content.get("choices", ()) for token in choice.get("token_ids") or ()]
        expected = self.case.expected[: self.max_tokens]
        if made != (expected if whole else expected[: len(made)]):
            return f"another answer: {made} instead of {expected}"
        reasons = [
            choice["finish_reason"] for content in record.contents for choice in content.get("choices", ()) if choice["finish_reason"]
        ]
        return "" if not whole or reasons == ["length"] else f"ended {reasons}"


class Client:
    """One client of a server; it visits one after the other and keeps its connection as long as it may."""

    def __init__(self, host: str, port: int, seen: Seen) -> None:
        self._place = (host, port)
        self.seen = seen
        self._connection: Connection | None = None

    async def visit(self, visit: Visit) -> str:
        """Do it and judge what came back."""
        return await KINDS[visit.kind](self, visit)

    async def connection(self) -> Connection:
        """The one that is open, or a new one."""
        if self._connection is None or self._connection.transport is None or self._connection.transport.is_closing():
            self._connection = await connect(*self._place)
        return self._connection

    async def record(self, ask: Ask) -> Record:
        """Ask and wait."""
        request = post(ask.path, ask.encoded(), host="soak")
        record = await send(await self.connection(), ask, request, due=time.perf_counter(), timeout_s=BOUND_S)
        note(record, self.seen)
        return record

    async def closed(self) -> None:
        """Hang up."""
        if self._connection is not None:
            await self._connection.closed()


def timed_out(record: Record) -> bool:
    """The server said so, before its answer or in it."""
    return not record.broken and ("timeout" in record.error or record.answer.status == 408)


def note(record: Record, seen: Seen) -> None:
    """Add up what came of it. Answers run to their `max_tokens`, or a verdict tells."""
    prompt, most = len(record.ask.body["prompt"]), record.ask.body["max_tokens"]
    if not record.error:
        seen.answered += 1
        seen.prompt_tokens += prompt
        seen.made_tokens += most
        seen.seconds += record.ended - record.sent
        return
    seen.perhaps_prompt_tokens += prompt
    seen.perhaps_made_tokens += most
    seen.timed_out += timed_out(record)
    seen.timed_out_early += record.answer.status == 408
    seen.perhaps += bool(record.broken)


async def whole(client: Client, visit: Visit) -> str:
    """Asks and gets its answer in one."""
    return visit.verdict(await client.record(visit.ask(stream=False)))


async def streamed(client: Client, visit: Visit) -> str:
    """Asks and reads."""
    return visit.verdict(await client.record(visit.ask(stream=True)))


async def slow(client: Client, visit: Visit) -> str:
    """Stops reading for a while in the middle; nothing may be missing afterwards."""
    ask = visit.ask(stream=True, logprobs=5)  # more bytes
    connection = await client.connection()
    asking = asyncio.ensure_future(client.record(ask))
    await asyncio.sleep(visit.rng.uniform(0, 0.02))
    if connection.transport is not None and not connection.transport.is_closing():
        connection.transport.pause_reading()
        await asyncio.sleep(visit.rng.uniform(0.05, 0.3))
        connection.transport.resume_reading()
    return visit.verdict(await asking)


async def gone(client: Client, visit: Visit) -> str:
    """Hangs up at any time, reading a stream or waiting; what came until then must be right."""
    stream = visit.rng.random() < 0.7
    ask = visit.ask(stream=stream)
    connection = await client.connection()
    asking = asyncio.ensure_future(client.record(ask))
    await asyncio.sleep(visit.rng.choice((0.0, 0.002, 0.01, 0.05)))
    connection.close()
    record = await asking
    return visit.verdict(record, whole=not record.broken)


async def half(client: Client, visit: Visit) -> str:
    """Sends a part of a request and hangs up."""
    connection = await client.connection()
    ask = visit.ask(stream=False)
    request = post(ask.path, ask.encoded(), host="soak")
    asking = asyncio.ensure_future(connection.ask(request[: visit.rng.randrange(1, len(request))]))
    await asyncio.sleep(0.005)
    connection.close()
    client.seen.half += 1
    try:
        await asking
    except (BrokenAnswer, OSError):
        return ""
    return "half a request was answered"


async def hurried(client: Client, visit: Visit) -> str:
    """Allows less time than it may take: the right answer, or word of the timeout after a right beginning."""
    record = await client.record(visit.ask(stream=visit.rng.random() < 0.5, timeout_s=visit.rng.choice((0.001, 0.02, 0.1))))
    if timed_out(record):
        return visit.verdict(record, whole=False)
    return visit.verdict(record)


async def nonsense(client: Client, visit: Visit) -> str:
    """Asks what can't be answered: a 400 that says why, and the connection lives on."""
    good: Any = visit.ask(stream=False).body
    body = visit.rng.choice(
        (
            b'{"prompt": [1, 2',
            b"\xff\xfe\x00",
            b"[]",
            json.dumps(good | {"prompt": []}).encode(),
            json.dumps(good | {"prompt": [10**9]}).encode(),
            json.dumps(good | {"temperature": -1}).encode(),
            json.dumps(good | {"max_tokens": 10**9}).encode(),
            json.dumps(good | {"no_such_field": 1}).encode(),
            json.dumps(good | {"stream": "yes"}).encode(),
        )
    )
    answer = await (await client.connection()).ask(post(PATH, body, host="soak"))
    message = json.loads(answer.body).get("error", {}).get("message")
    client.seen.refused += 1
    return "" if answer.status == 400 and message else f"status {answer.status} for {body[:80]!r}: {answer.body[:200]!r}"


KINDS: dict[str, Callable[[Client, Visit], Awaitable[str]]] = {
    "whole": whole,
    "streamed": streamed,
    "slow": slow,
    "gone": gone,
    "half": half,
    "hurried": hurried,
    "nonsense": nonsense,
}
SHARES = {"whole": 25, "streamed": 30, "slow": 8, "gone": 15, "half": 5, "hurried": 8, "nonsense": 9}

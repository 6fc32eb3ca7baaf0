"""The load client: answers that come in any pieces are read whole, and what the server does wrong is told, never raised."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from octavo.bench.load.client import Record, run
from octavo.bench.load.http1 import AnswerReader
from octavo.bench.load.workload import Ask, Lengths, completion, token_prompts

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ASK = Ask({"prompt": "x"})


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


STREAM = [
    event(choices=[{"index": 0, "text": "he", "finish_reason": None}], usage=None),
    event(choices=[{"index": 0, "text": "llo", "finish_reason": "length"}], usage=None),
    event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2}),
    b"data: [DONE]\n\n",
]
ANSWER = HEAD + b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"


def asked(handler: Handler, *asks: Ask, clients: int = 1, timeout_s: float = 10.0) -> list[Record]:
    """Send to a server of a test's own."""

    async def main() -> list[Record]:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await run(asks or (ASK,), f"http://127.0.0.1:{port}", clients=clients, timeout_s=timeout_s)

    return asyncio.run(asyncio.wait_for(main(), 30))


def answering(*parts: bytes, close: bool = False) -> Handler:
    """A server that answers each request with these writes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    return handle


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_an_answer_in_any_pieces_is_the_same(size: int) -> None:
    """Wherever the reads are cut: status, headers, body and end are those of httpx's parser for the same bytes."""
    reader = AnswerReader()
    for start in range(0, len(ANSWER), size):
        assert not reader.done
        reader.feed(ANSWER[start : start + size], float(start))
    assert reader.done and reader.answer.status == 200
    expected = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"".join(STREAM))
    assert reader.answer.body == expected.content
    assert [when for when, _ in reader.answer.pieces] == sorted(when for when, _ in reader.answer.pieces)


def test_a_stream_is_read() -> None:
    """Text, tokens by usage, the time of each event, and no error; the connection is kept for the next one."""
    first, second = asked(answering(HEAD, *map(chunk, STREAM), b"0\r\n\r\n"), ASK, ASK)
    for record in (first, second):
        assert (record.error, record.texts, record.num_tokens, record.num_prompt_tokens) == ("", {0: "hello"}, 2, 3)
        assert len(record.token_times) == 2 and record.due <= record.sent <= record.token_times[0] <= record.token_times[1] <= record.ended
    assert second.sent >= first.ended


def test_a_whole_answer_is_read() -> None:
    """With a content length."""
    body = json.dumps(
        {"choices": [{"index": 0, "message": {"content": "hi"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    ).encode()
    (record,) = asked(
        answering(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + f"content-length: {len(body)}\r\n\r\n".encode(), body)
    )
    assert (record.error, record.texts, record.num_tokens, record.streamed) == ("", {0: "hi"}, 1, False)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([HEAD, chunk(STREAM[0])], "the server hung up before the answer was whole"),
        ([HEAD, chunk(STREAM[0]), b"0\r\n\r\n"], "the stream ended without [DONE]"),
        ([HEAD, chunk(event(error={"message": "boom"})), chunk(STREAM[3]), b"0\r\n\r\n"], "200: boom"),
        ([b"HTTP/1.1 503 X\r\ncontent-length: 31\r\n\r\n", b'{"error": {"message": "later"}}'], "503: later"),
        ([b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"], "status 500"),
        ([b"SSH-2.0 hello\r\n\r\n"], "not an HTTP answer"),
        ([HEAD, b"zz\r\n"], "not a chunk's size"),
    ],
)
def test_what_is_no_answer_has_an_error(parts: list[bytes], error: str) -> None:
    """Never an exception, never taken for an answer."""
    (record,) = asked(answering(*parts, close=True))
    assert error in record.error


def test_a_server_that_is_silent_is_given_up() -> None:
    """After the timeout, and the next request has a connection of its own."""
    first, second = asked(answering(HEAD), ASK, ASK, timeout_s=0.1)
    assert "no whole answer within 0.1 s" in first.error and "no whole answer within 0.1 s" in second.error


def test_no_more_at_once_than_there_are_clients_and_each_at_its_time() -> None:
    """Three clients: three at once; a request is not sent before it is due."""
    now, most = 0, 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        while await reader.read(65536):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    records = asked(handle, *(Ask({}) for _ in range(12)), Ask({}, at=0.2), clients=3)
    assert most == 3 and len(records) == 13
    assert records[-1].sent >= records[-1].due >= records[0].due + 0.2


def test_a_workload_repeats() -> None:
    """The same seed gives the same requests, within the lengths; another seed others."""
    lengths = Lengths(prompt=(2, 9), output=(1, 5))
    one, same, other = (list(token_prompts(seed=seed, count=20, lengths=lengths, vocab_size=1000)) for seed in (1, 1, 2))
    assert one == same != other
    assert {len(prompt) for prompt, _ in one} <= set(range(2, 10)) and {output for _, output in one} <= set(range(1, 6))
    assert all(256 <= token < 1000 for prompt, _ in one for token in prompt)
    assert completion([1], 2, model="m", stream=True).body["stream_options"] == {"include_usage": True}

"""The load client: answers that come in any pieces are read whole, and what the server does wrong is told, never raised."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import httpx
import pytest

from octavo.bench.load.client import Pool, Record, run, send
from octavo.bench.load.http1 import AnswerReader, Connection, connect, post
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


WHOLE = b'{"choices": [{"index": 0, "text": "hi"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
ANSWERS = {
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
    "chunks": ANSWER,
    "Chunks": ANSWER.replace(b": chunked", b": Chunked"),
    "the connection's end": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + WHOLE,
    "the connection's end, 1.0": b"HTTP/1.0 200 OK\r\n\r\n" + WHOLE,
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
    "a length of nothing": b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n",
    "word of it": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ANSWER,
}


@pytest.mark.parametrize("size", [1, 9, 10_000])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_ends_where_http_says(name: str, size: int) -> None:
    """By its length, its chunks, or with the connection: status and body are those of h11's parser, and so is when it is whole."""
    sent = ANSWERS[name]
    reader, peer = AnswerReader(), h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    peer.send(h11.EndOfMessage())
    status, body, done = 0, b"", False
    for piece in [sent[start : start + size] for start in range(0, len(sent), size)] + [b""]:
        if done:
            break
        if piece:
            reader.feed(piece, 0.0)
        else:
            reader.end()
        peer.receive_data(piece)
        while (said := peer.next_event()) is not h11.NEED_DATA and not done:
            if isinstance(said, h11.Response):
                status = said.status_code
            elif isinstance(said, h11.Data):
                body += bytes(said.data)
            done = isinstance(said, h11.EndOfMessage)
        assert reader.done == done
    assert done and (reader.answer.status, reader.answer.body) == (status, body)


def test_an_answer_that_ends_with_its_connection_is_read() -> None:
    """In one piece and as a stream; the next request has a connection of its own."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    for record in asked(answering(head, *STREAM, close=True), ASK, ASK):
        assert (record.error, record.texts, record.num_tokens) == ("", {0: "hello"}, 2)
    for record in asked(answering(b"HTTP/1.1 200 OK\r\n\r\n", WHOLE, close=True), ASK, ASK):
        assert (record.error, record.texts, record.num_tokens) == ("", {0: "hi"}, 1)
    (record,) = asked(answering(head, *STREAM[:2], close=True))
    assert record.error == "the stream ended without [DONE]"


OTHER_STREAMS = {
    "comments": [b": ping\n\n", STREAM[0], b":\n", *STREAM[1:]],
    "no blank": [one.replace(b"data: ", b"data:") for one in STREAM],
    "names and ids": [b"event: message\nid: 7\n" + one for one in STREAM],
    "returns": [one.replace(b"\n", b"\r\n") for one in STREAM],
    "several lines": [one.replace(b'"index"', b'\ndata: "index"') for one in STREAM],
    "empty events": [b"data:\n\n", *STREAM],
}


@pytest.mark.parametrize("name", OTHER_STREAMS)
def test_streams_as_other_servers_send_them(name: str) -> None:
    """All that the rules of server-sent events allow is read like our own server's."""
    (record,) = asked(answering(HEAD, *map(chunk, OTHER_STREAMS[name]), b"0\r\n\r\n"))
    assert (record.error, record.texts, record.num_tokens, len(record.token_times)) == ("", {0: "hello"}, 2, 2)
    assert [when for when, _ in record.events] == sorted(when for when, _ in record.events)


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
        ([HEAD, b"-5\r\nhello\r\n"], "not a chunk's size"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n"], "not a length of a body: 'many'"),
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


def pooled(handler: Handler, *, count: int = 1, timeout_s: float = 10.0, opening: Callable[[], Awaitable[None]]) -> list[Record]:
    """One after the other through a pool; before each connection that it opens, `opening` is awaited."""

    async def main() -> list[Record]:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]

            async def open_one() -> Connection:
                await opening()
                return await connect("127.0.0.1", port)

            pool, request = Pool(open_one), post("/v1/completions", b"{}", host="x")
            records = [await pool.send(ASK, request, due=time.perf_counter(), timeout_s=timeout_s) for _ in range(count)]
            await pool.closed()
            return records

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_a_request_is_sent_before_its_connection_is_open() -> None:
    """Connecting is waiting for the server, as with a full queue of connections: it is in the time to the first token."""
    opened: list[float] = []

    async def opening() -> None:
        opened.append(time.perf_counter())

    (record,) = pooled(answering(HEAD, *map(chunk, STREAM), b"0\r\n\r\n"), opening=opening)
    assert record.error == "" and record.sent <= opened[0] <= record.token_times[0]


def test_a_connection_that_never_opens_is_given_up() -> None:
    """One time limit is for all of a request."""

    async def opening() -> None:
        await asyncio.Event().wait()

    (record,) = pooled(answering(), timeout_s=0.05, opening=opening)
    assert record.broken == "no whole answer within 0.05 s" and record.ended > record.sent


def test_a_request_that_is_sent_again_was_sent_the_first_time() -> None:
    """What the try in vain took is waiting for the server, too."""
    asked_at: list[float] = []
    whole = answering(HEAD, *map(chunk, STREAM), b"0\r\n\r\n", close=False)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asked_at:  # the second connection
            await whole(reader, writer)
            return
        for answer in (ANSWER, b""):
            await reader.readuntil(b"{}")
            asked_at.append(time.perf_counter())
            writer.write(answer)
        writer.close()

    async def opening() -> None:
        await asyncio.sleep(0)

    first, second = pooled(handle, count=2, opening=opening)
    assert [record.error for record in (first, second)] == ["", ""] and (first.num_retries, second.num_retries) == (0, 1)
    assert first.ended <= second.sent <= asked_at[1] <= second.token_times[0]


def test_no_connection_is_told() -> None:
    """By the server's own refusal, as a record; and a time limit of `connect` says so itself."""

    async def refuse() -> Connection:
        raise ConnectionRefusedError(111, "Connection refused")

    record = asyncio.run(Pool(refuse).send(ASK, b"", due=0.0, timeout_s=1.0))
    assert record.broken == "no connection: Connection refused" and record.sent <= record.ended

    async def endless(*args: Any, **options: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        asyncio.get_running_loop().create_connection = endless  # type: ignore[method-assign,assignment]
        await connect("somewhere", 7, timeout_s=0.01)

    with pytest.raises(TimeoutError, match=r"somewhere:7 did not take it within 0\.01 s"):
        asyncio.run(main())


def test_what_came_before_is_not_taken_for_an_answer() -> None:
    """A connection that is closed has none, whatever it had brought until then."""

    async def main() -> Record:
        server = await asyncio.start_server(answering(ANSWER, close=True), "127.0.0.1", 0)
        async with server:
            connection = await connect("127.0.0.1", server.sockets[0].getsockname()[1])
            request = post("/v1/completions", b"{}", host="x")
            await connection.ask(request)
            await connection.closed()
            return await send(connection, ASK, request, due=0.0, timeout_s=1.0)

    record = asyncio.run(main())
    assert record.broken == "the connection is closed" and record.answer.status == 0


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

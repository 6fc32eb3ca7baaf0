"""A work against a server: when requests are sent, what is read of the answers, and other kinds of servers. They are a test's own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.interrupts import RunFailed, RunInterrupted
from octavo.bench.load import drive as driving, http1
from octavo.bench.load.drive import drive_http
from octavo.bench.load.target import CHAT, Target, TargetError, find_out
from octavo.bench.records import RequestRecord
from octavo.bench.work import Item, Work

Body = dict[str, Any]
Reply = Callable[["Server", Body, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(content: Any) -> bytes:
    data = b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def answer(status: int, content: Any) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Server:
    """Answers a completion with ids 1, 2, 3 ... as a stream, each as the text `t`; `knows` are the fields that it takes."""

    def __init__(
        self, *, reply: Reply | None = None, knows: Sequence[str] = ("ignore_eos", "return_token_ids"), text_only: bool = False
    ) -> None:
        self.reply = reply or Server.stream
        self.knows = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options", *knows}
        self.text_only = text_only
        self.bodies: list[Body] = []
        self.heads: list[str] = []
        self.now = self.most = self.connections = 0
        self.pause = 0.005
        self.url = ""
        self.tls: ssl.SSLContext | None = None

    async def stream(self, body: Body, writer: asyncio.StreamWriter) -> None:
        """All tokens, one an event, then usage."""
        writer.write(HEAD)
        for number in range(body["max_tokens"]):
            await asyncio.sleep(self.pause)
            last = number + 1 == body["max_tokens"]
            choice: Body = {"index": 0, "text": "t", "finish_reason": "length" if last else None}
            if body.get("return_token_ids"):
                choice["token_ids"] = [number + 1]
            writer.write(event({"choices": [choice]}))
        size = len(body["prompt"].split()) if isinstance(body["prompt"], str) else len(body["prompt"])
        usage = {"prompt_tokens": size, "completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 2}}
        writer.write(event({"choices": [], "usage": usage}) + event(b"[DONE]") + b"0\r\n\r\n")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                if head.startswith("GET"):
                    writer.write(answer(200, {"data": [{"id": "only-model"}]}))
                    continue
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.now += 1
                self.most = max(self.most, self.now)
                unknown = set(body) - self.knows
                if unknown or (self.text_only and not isinstance(body["prompt"], str)):
                    writer.write(answer(400, {"error": {"message": f"unknown: {sorted(unknown)}"}}))
                else:
                    self.bodies.append(body)
                    await self.reply(self, body, writer)
                self.now -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """In a loop of its own, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=server.tls), loop).result(10)
    scheme = "http" if server.tls is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    async def end() -> None:
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def item(prompt: int = 3, output: int = 2, **fields: Any) -> Item:
    return Item(prompt=tuple(range(10, 10 + prompt)), output_len=output, **fields)


def work(*items: Item) -> Work:
    return Work(name="test", items=items)


def driven(server: Server, *items: Item, **settings: Any) -> list[RequestRecord]:
    with serving(server):
        return drive_http(Target(url=server.url, model="m"), work(*items), **settings)


def test_an_open_loop() -> None:
    """Each at its time, on connections that are kept; times are those of the events, and all that the server says is recorded."""
    server = Server()
    seen: list[int] = []
    records = driven(server, item(output=3), item(prompt=4, at=0.05), item(at=0.3), progress=lambda record: seen.append(record.index))
    assert [record.due for record in records] == [0.0, 0.05, 0.3] and seen == [0, 1, 2]
    for record in records:
        assert record.finish_reason == "length" and record.succeeded and record.num_cached_tokens == 2
        assert record.due <= record.sent < record.token_times[0] and record.token_times == sorted(record.token_times)
        assert record.token_times[-1] <= record.ended and record.first_scheduled is None
    assert [record.token_ids for record in records] == [[1, 2, 3], [1, 2], [1, 2]]
    assert [record.num_prompt_tokens for record in records] == [3, 4, 3]
    assert server.connections <= 2
    assert server.bodies[0] == {
        "model": "m", "prompt": [10, 11, 12], "max_tokens": 3, "temperature": 0, "stream": True, "ignore_eos": True,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop(concurrency: int) -> None:
    """So many at once and no more, whatever their times say; due when a seat fell free."""
    server = Server()
    records = driven(server, *(item(at=50.0 * n) for n in range(9)), concurrency=concurrency)
    assert server.most == server.connections == concurrency
    assert sum(record.due == 0.0 for record in records) == concurrency
    ends = {record.ended for record in records}
    assert all(record.due in ends for record in records if record.due)


def test_a_conversation() -> None:
    """A later turn brings what was said before it, as ids; without ids from the server, as text."""
    turns = (item(prompt=2, output=2), item(prompt=1, output=1, after=0, pause=0.05))
    server = Server()
    first, second = driven(server, *turns)
    assert server.bodies[1]["prompt"] == [10, 11, 1, 2, 10] and second.num_prompt_tokens == 5
    assert second.due == pytest.approx(first.ended + 0.05)
    server = Server(knows=())
    with serving(server):
        target = Target(url=server.url, model="m", gives_ids=False, extras={})
        drive_http(target, work(*turns), decode=lambda ids: " ".join(map(str, ids)))
    assert [body["prompt"] for body in server.bodies] == ["10 11", "10 11tt10"]


async def hang_up(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event({"choices": [{"index": 0, "text": "t", "token_ids": [1]}]}))
    writer.close()


def refusing(status: int) -> Reply:
    async def refuse(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(status, {"error": {"message": "no"}}))

    return refuse


async def silent(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(5)


async def garbage(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(b"{nonsense") + b"0\r\n\r\n")


async def in_one_piece(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(200, {"choices": [{"index": 0, "text": "t", "finish_reason": "length"}]}))


@pytest.mark.parametrize(
    ("reply", "reason", "error"),
    [
        (hang_up, "error", "the server hung up"),
        (refusing(400), "refused", "400: no"),
        (refusing(503), "refused", "503: no"),
        (refusing(500), "error", "500: no"),
        (refusing(408), "timeout", "408: no"),
        (silent, "timeout", "no whole answer within 0.2 s"),
        (garbage, "error", "status 200, and not what an OpenAI-compatible server answers"),
        (in_one_piece, "error", "an answer in one piece"),
    ],
)
def test_what_goes_wrong_is_a_record(reply: Reply, reason: str, error: str) -> None:
    """And ends its conversation; the others go on."""
    records = driven(Server(reply=reply), item(), item(after=0), item(), timeout_s=0.2)
    assert [record.finish_reason for record in records] == [reason, "", reason]
    assert records[0].status == (int(error[:3]) if error[:3].isdigit() else records[0].status)
    assert error in records[0].error and not any(record.succeeded for record in records)
    assert records[1].error == f"not sent: item 0, which it goes on from, has no answer ({reason})"


def test_a_server_that_is_gone() -> None:
    """No connection is an error like others, at once."""
    with serving(Server()) as server:
        target = Target(url=server.url, model="m")
    (record,) = drive_http(target, work(item()))
    assert record.finish_reason == "error" and record.error.startswith("no connection: ")


def test_a_server_that_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has not answered within the time limit, which begins before the connection; and the client sent on time."""

    async def connect(self: Target) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Target, "connect", connect)
    records = drive_http(Target(url="http://127.0.0.1:9", model="m"), work(item(), item()), timeout_s=0.1)
    assert [(record.finish_reason, record.error) for record in records] == [("timeout", "no whole answer within 0.1 s")] * 2
    assert all(record.due <= record.sent < record.ended for record in records)


def test_a_server_that_closes_idle_connections() -> None:
    """Whoever is asked on a connection that the server has just closed is asked again on a new one."""

    async def once(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
        await server.stream(body, writer)
        await writer.drain()
        writer.close()

    records = driven(Server(reply=once), *(item(output=1, at=n * 0.02) for n in range(6)))
    assert [record.finish_reason for record in records] == ["length"] * 6
    assert all(record.status == 200 for record in records)


def test_a_retry_is_counted() -> None:
    """Of a request that was sent on a connection on which the server had just hung up."""

    async def grumpy(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) == 2:
            writer.close()
        else:
            await server.stream(body, writer)

    records = driven(Server(reply=grumpy), *(item(output=1) for _ in range(3)), concurrency=1)
    assert [record.num_retries for record in records] == [0, 1, 0] and all(record.succeeded for record in records)


def test_ctrl_c_keeps_what_is_done() -> None:
    """Answered ones are whole, those under way aborted, later ones absent."""
    server = Server()
    server.pause = 0.02
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RunInterrupted) as caught:
        driven(server, item(), item(output=500), item(at=60.0))
    assert [record.finish_reason for record in caught.value.records] == ["length", "abort"]
    assert caught.value.records[0].token_ids == [1, 2]


def test_ctrl_c_while_answers_are_read_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are read."""
    real = driving.fill

    def fill(record: RequestRecord, *args: Any, **options: Any) -> RequestRecord:
        if record.index == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return real(record, *args, **options)

    monkeypatch.setattr(driving, "fill", fill)
    with pytest.raises(RunInterrupted) as caught:
        driven(Server(), item(), item(), item())
    assert [record.token_ids for record in caught.value.records] == [[1, 2]] * 3 and all(one.succeeded for one in caught.value.records)


def test_a_second_ctrl_c_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the requests of the first one are being given up."""
    real = driving.Pool.closed

    async def closed(self: driving.Pool) -> None:
        await real(self)
        os.kill(os.getpid(), signal.SIGINT)

    server = Server()
    server.pause = 0.02
    monkeypatch.setattr(driving.Pool, "closed", closed)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RunInterrupted) as caught:
        driven(server, item(), item(output=500), item(at=60.0))
    assert [(record.finish_reason, record.cut_short) for record in caught.value.records] == [("length", False), ("abort", True)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("fault", ["decode", "progress"])
def test_a_fault_of_the_client_keeps_what_is_done(fault: str) -> None:
    """It ends the run, with the records so far."""
    over: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        if fault == "decode" and len(ids) == 1:
            raise ZeroDivisionError("no text")
        return " ".join(map(str, ids))

    def progress(record: RequestRecord) -> None:
        over.append(record.index)
        if fault == "progress" and len(over) == 2:
            raise ZeroDivisionError("no bar")

    with serving(Server(knows=())) as server:
        target = Target(url=server.url, model="m", gives_ids=False, takes_ids=False, extras={})
        with pytest.raises(RunFailed, match="ZeroDivisionError: no ") as caught:
            drive_http(target, work(item(), item(prompt=1, after=0), item(at=60.0)), decode=decode, progress=progress)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.records[0].succeeded and len(caught.value.records) == 2


def test_whatever_an_answer_holds_it_is_a_record() -> None:
    """A number of tokens that is none, and a text that is too deep to be read."""
    for content in (b'{"choices": [], "usage": {"completion_tokens": Infinity, "prompt_tokens": 1}}', b"[" * 100_000):

        async def odd(server: Server, body: Body, writer: asyncio.StreamWriter, content: bytes = content) -> None:
            writer.write(HEAD + event(content) + b"0\r\n\r\n")

        (record,) = driven(Server(reply=odd), item())
        assert record.error == "status 200, and not what an OpenAI-compatible server answers" and record.finish_reason == "error"


@pytest.mark.parametrize(
    ("server", "takes_ids", "gives_ids", "extras", "differences"),
    [
        (Server(), True, True, {"ignore_eos", "return_token_ids"}, ""),
        (Server(knows=["ignore_eos"]), True, False, {"ignore_eos"}, "it gives no token ids"),
        (Server(knows=[]), True, False, set(), "it knows no ignore_eos"),
        (Server(knows=[], text_only=True), False, False, set(), "it takes no token ids"),
    ],
)
def test_what_a_server_takes_is_found_out(server: Server, takes_ids: bool, gives_ids: bool, extras: set[str], differences: str) -> None:
    """By asking shortly; the model's name too. What differs from Octavo's own server is said."""
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    with serving(server):
        found = asyncio.run(find_out(Target(url=server.url, headers={"Authorization": "Bearer k"}), [1, 2, 3], decode=decode))
        assert (found.model, found.takes_ids, found.gives_ids, set(found.extras)) == ("only-model", takes_ids, gives_ids, extras)
        assert differences in found.differences and bool(found.differences) != found.is_like_ours
        (record,) = drive_http(found, work(item(output=4)), decode=decode)
    assert (record.num_prompt_tokens, record.num_output_tokens, len(record.token_times)) == (3, 4, 4)
    assert record.succeeded and all("Authorization: Bearer k" in head for head in server.heads)


def test_targets_that_are_none() -> None:
    """Each with what is wrong."""
    with pytest.raises(TargetError, match=r"the base URL 'ftp://x' is not http://HOST:PORT or https://HOST"):
        Target(url="ftp://x")
    with serving(Server()) as server:
        gone = Target(url=server.url)
    with pytest.raises(TargetError, match="no server answers at http:"):
        asyncio.run(find_out(gone, [1]))
    with serving(Server(reply=refusing(404))) as server, pytest.raises(TargetError, match="does not answer a short request: 404: no"):
        asyncio.run(find_out(Target(url=server.url, model="m"), [1]))
    turns, no_ids = work(item(), item(after=0)), replace(gone, gives_ids=False)
    for target, asked in ((replace(gone, takes_ids=False), work(item())), (replace(gone, endpoint=CHAT), work(item())), (no_ids, turns)):
        with pytest.raises(TargetError, match="a tokenizer must make text"):
            drive_http(target, asked)
    with pytest.raises(TargetError, match="/v1/chat/completions takes text: a tokenizer must make it"):
        asyncio.run(find_out(replace(gone, endpoint=CHAT), [1]))


def test_a_prefix_in_the_address() -> None:
    """Is kept before every path."""
    assert Target(url="http://h:1/api/").path("/v1/models") == "/api/v1/models"


async def chatting(server: Server, body: Body, writer: asyncio.StreamWriter) -> None:
    """As OpenAI streams a chat: the role first, then what is said, then how it ended."""
    writer.write(HEAD + event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}))
    for number in range(body["max_tokens"]):
        await asyncio.sleep(server.pause)
        writer.write(event({"choices": [{"index": 0, "delta": {"content": f"w{number}"}, "finish_reason": None}]}))
    writer.write(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
    usage = {"prompt_tokens": 20, "completion_tokens": body["max_tokens"]}
    writer.write(event({"choices": [], "usage": usage}) + event(b"[DONE]") + b"0\r\n\r\n")


def test_a_chat() -> None:
    """Messages, turn after turn; the first token is the first text, and prompt tokens are as many as the server counts."""
    server = Server(reply=chatting, knows=["messages"])
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    with serving(server):
        found = asyncio.run(find_out(Target(url=server.url, model="m", endpoint=CHAT), [1, 2], decode=decode))
        records = drive_http(found, work(item(output=2), item(prompt=1, output=1, after=0)), decode=decode)
    assert (found.takes_ids, found.gives_ids, set(found.extras)) == (False, False, set())
    assert "a chat takes text" in found.differences
    first = {"role": "user", "content": "10 11 12"}
    assert server.bodies[-2]["messages"] == [first] and "prompt" not in server.bodies[-1]
    assert server.bodies[-1]["messages"] == [first, {"role": "assistant", "content": "w0w1"}, {"role": "user", "content": "10"}]
    assert all(head.startswith("POST /v1/chat/completions ") for head in server.heads if head.startswith("POST"))
    assert [(one.num_prompt_tokens, one.num_output_tokens, len(one.token_times)) for one in records] == [(20, 2, 2), (20, 1, 1)]
    assert records[0].token_times[0] > records[0].sent + 0.8 * server.pause  # not the event with the role


def test_a_request_names_its_class_where_the_server_knows_it() -> None:
    """And no other one."""
    server = Server()
    with serving(server):
        target = Target(url=server.url, model="m", classes=frozenset({"batch"}))
        drive_http(target, work(item(class_name="batch"), item(class_name="chat"), item()), concurrency=1)
    heads = [[line for line in head.split("\r\n") if line.startswith("X-")] for head in server.heads]
    assert heads == [["X-Octavo-Class: batch"], [], []]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Of 127.0.0.1, signed by nobody but itself, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=test"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    return made, key


def test_https(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that the system trusts is taken, another one is refused with the reason; answers are as without TLS."""
    server = Server()
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(*certificate)
    http1._checking.cache_clear()
    with serving(server):
        with pytest.raises(TargetError, match="certificate verify failed"):
            asyncio.run(find_out(Target(url=server.url), [1]))
        (failed,) = drive_http(Target(url=server.url, model="m"), work(item()))
        assert "certificate verify failed" in failed.error and failed.finish_reason == "error"
        http1._checking.cache_clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        found = asyncio.run(find_out(Target(url=server.url), [1, 2, 3]))
        records = drive_http(found, work(item(output=3), item()))
    http1._checking.cache_clear()
    assert found.model == "only-model" and found.is_like_ours
    assert [record.token_ids for record in records] == [[1, 2, 3], [1, 2]] and all(record.succeeded for record in records)

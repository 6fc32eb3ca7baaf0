"""HTTP/1.1 as far as a load client needs it: one connection that is kept, one request at a time, each read of the socket with its time.

It parses no more than where an answer ends, so that many streams cost the client little. Must not know: what is asked or answered.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from functools import cache
from typing import cast


class BrokenAnswer(Exception):
    """The server hung up in the middle, or sent what is no HTTP/1.1."""


@dataclass(slots=True)
class Answer:
    """What came back. Times are `time.perf_counter`'s."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # of the body, as they arrived

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)


class AnswerReader:
    """Feed it what arrives; it is done when the answer is whole."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.done = False
        self._buffer = b""
        self._left = 0  # bytes of the body, where its length is given
        self._chunked = False
        self._until_end = False  # the body ends with the connection

    def feed(self, data: bytes, now: float) -> None:
        """Take what arrived at `now`. Raises BrokenAnswer."""
        self._buffer += data
        if not self.answer.status and not self._read_head():
            return
        parts: list[bytes] = []
        while not self.done and (self._read_chunk(parts) if self._chunked else self._read_length(parts)):
            pass
        if parts:
            self.answer.pieces.append((now, b"".join(parts)))

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        try:
            status = int(first.split(" ", 2)[1])
        except (IndexError, ValueError):
            raise BrokenAnswer(f"not an HTTP answer: {first!r:.80}") from None
        self._buffer = rest
        if 100 <= status < 200:  # word that the answer is still to come
            return self._read_head()
        self.answer.status = status
        self.answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._find_end()
        return True

    def _find_end(self) -> None:
        """Where the body ends: RFC 9112, section 6.3."""
        coding, length = (self.answer.headers.get(name) for name in ("transfer-encoding", "content-length"))
        if self.answer.status in (204, 304):
            return
        if coding is not None:
            self._chunked = coding.lower().rpartition(",")[2].strip() == "chunked"
            self._until_end = not self._chunked
        elif length is None:
            self._until_end = True
        elif length.isascii() and length.isdigit():
            self._left = int(length)
        else:
            raise BrokenAnswer(f"not a length of a body: {length!r:.80}")

    def end(self) -> None:
        """The server has hung up."""
        self.done = self.done or self._until_end

    def _read_length(self, parts: list[bytes]) -> bool:
        if self._until_end:
            parts.append(self._buffer)
            self._buffer = b""
            return False
        parts.append(self._buffer[: self._left])
        self._left -= len(parts[-1])
        self._buffer = b""
        self.done = self._left == 0
        return False

    def _read_chunk(self, parts: list[bytes]) -> bool:
        """One chunk, with the line that gives its size; False: more must arrive."""
        size, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        try:
            length = int(size.partition(b";")[0], 16)
            if length < 0:
                raise ValueError(length)
        except ValueError:
            raise BrokenAnswer(f"not a chunk's size: {size!r:.80}") from None
        if len(rest) < length + 2:
            return False
        parts.append(rest[:length])
        self._buffer = rest[length + 2 :]
        self.done = length == 0
        return True


class Connection(asyncio.Protocol):
    """A connection to a server. Made by `connect`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._lost = asyncio.Event()

    async def ask(self, request: bytes) -> Answer:
        """Send a request and wait for its answer. Raises BrokenAnswer, ConnectionError."""
        if self.transport is None or self.transport.is_closing():
            self._reader = None
            raise ConnectionError("the connection is closed")
        self._reader = AnswerReader()
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    @property
    def so_far(self) -> Answer:
        """What has come of the answer."""
        return Answer() if self._reader is None else self._reader.answer

    def close(self) -> None:
        """Hang up, in the middle of an answer too."""
        if self.transport is not None:
            self.transport.abort()

    async def closed(self) -> None:
        """Hang up and wait until the socket is gone."""
        self.close()
        await self._lost.wait()

    # --------------------------------------------------------- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self.transport = cast(asyncio.Transport, transport)  # a stream's, as create_connection makes them

    def data_received(self, data: bytes) -> None:
        """Something arrived."""
        now, reader, waiter = time.perf_counter(), self._reader, self._waiter
        if reader is None or waiter is None or waiter.done():
            return
        try:
            reader.feed(data, now)
        except BrokenAnswer as error:
            waiter.set_exception(error)
            self.close()
            return
        if reader.done:
            if reader.answer.headers.get("connection", "").lower() == "close":
                self.close()
            waiter.set_result(reader.answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._lost.set()
        if self._waiter is None or self._waiter.done():
            return
        if self._reader is not None and exc is None:
            self._reader.end()
            if self._reader.done:
                self._waiter.set_result(self._reader.answer)
                return
        self._waiter.set_exception(BrokenAnswer(f"the server hung up before the answer was whole ({exc or 'end of file'})"))


async def connect(host: str, port: int, *, tls: bool = False, timeout_s: float | None = None) -> Connection:
    """Open one; with `tls` its certificate is checked as the system has it. Raises OSError; ssl.SSLError and TimeoutError are some."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port, ssl=_checking() if tls else None)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{host}:{port} did not take it within {timeout_s:g} s") from None
        raise
    return connection


@cache
def _checking() -> ssl.SSLContext:
    """The system's authorities, or those of the environment's SSL_CERT_FILE; read once."""
    return ssl.create_default_context()


def post(path: str, body: bytes, *, host: str, headers: dict[str, str] | None = None) -> bytes:
    """A POST request of JSON."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str, *, host: str, headers: dict[str, str] | None = None) -> bytes:
    """A GET request."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return "\r\n".join([*lines, "", ""]).encode()

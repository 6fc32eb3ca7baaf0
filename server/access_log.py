"""One line a request of /v1 in the log, when both its answer and the engine are done with it, and how many are not answered yet.

Prompts are in it only where asked for. Must not know: routes' insides, the form of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.outputs import RequestOutput
from octavo.server.errors import GONE
from octavo.server.tallies import reason_of

logger = logging.getLogger("octavo.access")

MOST_WAITING = 4096  # lines that wait for the engine


@dataclass(eq=False, slots=True)
class Line:
    """What is known of one HTTP request."""

    method: str
    path: str
    model: str
    began: float
    status: int = GONE
    seconds: float = 0.0
    open: set[str] = field(default_factory=set)  # requests that the engine was given and has not ended
    ended: list[dict[str, Any]] = field(default_factory=list)


_current: ContextVar[Line | None] = ContextVar("octavo_access_line", default=None)


class AccessLog:
    """Belongs to the event loop, except for the observer's method, which the engine's thread calls."""

    def __init__(self, *, model: str, log_prompts: bool) -> None:
        self.num_active = 0  # not answered yet
        self.answered: dict[tuple[str, str, str], int] = {}  # by method, route and status
        self._model = model
        self._log_prompts = log_prompts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._by_id: dict[str, Line] = {}
        self._waiting: dict[Line, None] = {}  # answered; the engine has not ended all of it
        self._facts: deque[dict[str, Any]] = deque()
        self._told = False  # the event loop will look at the facts
        self._nothing_comes = False

    # ---------------------------------------------------------- the engine's thread

    def octavo_request_finished(self, output: RequestOutput) -> None:
        """Hand over what the line says of it."""
        if self._loop is None:
            return
        self._facts.append(_facts(output, with_prompt=self._log_prompts))
        if not self._told:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed: nobody is left to be logged
                self._facts.clear()

    # --------------------------------------------------------------- the event loop

    def begin(self, scope: Scope) -> Line:
        """A request came; those that this task gives to the engine are its own."""
        self._loop = asyncio.get_running_loop()
        self.num_active += 1
        line = Line(scope["method"], scope["path"], self._model, monotonic())
        _current.set(line)
        return line

    def note(self, request_id: str) -> None:
        """The engine is about to be given this request."""
        line = _current.get()
        if line is not None:
            line.open.add(request_id)
            self._by_id.setdefault(request_id, line)  # a second one of the same id is refused

    def end(self, line: Line, scope: Scope) -> None:
        """The answer was sent, or the client has gone."""
        self.num_active -= 1
        line.seconds = monotonic() - line.began
        route = getattr(scope.get("route"), "path", "")
        key = (line.method, route, str(line.status))
        self.answered[key] = self.answered.get(key, 0) + 1
        if not line.open or self._nothing_comes or (line.status >= 400 and line.status != GONE):
            self._write(line)
            return
        self._waiting[line] = None
        if len(self._waiting) > MOST_WAITING:
            self._write(next(iter(self._waiting)))

    def flush(self) -> None:
        """The engine ends nothing any more."""
        self._nothing_comes = True
        for line in list(self._waiting):
            self._write(line)

    def _take(self) -> None:
        self._told = False
        while self._facts:
            facts = self._facts.popleft()
            line = self._by_id.pop(facts["id"], None)
            if line is None:
                continue
            line.open.discard(facts["id"])
            line.ended.append(facts)
            if not line.open and line in self._waiting:
                self._write(line)

    def _write(self, line: Line) -> None:
        self._waiting.pop(line, None)
        for request_id in line.open:
            if self._by_id.get(request_id) is line:
                del self._by_id[request_id]
        fields: dict[str, Any] = {
            "method": line.method,
            "path": line.path,
            "status": line.status,
            "seconds": round(line.seconds, 6),
            "model": line.model,
            **_joined(line.ended),
        }
        logger.info("%s %s %d", line.method, line.path, line.status, extra={"fields": fields})


class AccessLines:
    """The middleware that begins and ends the lines."""

    def __init__(self, app: ASGIApp, *, log: AccessLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        line, status = self._log.begin(scope), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                line.status = status

        try:
            await self._app(scope, receive, noted)
        finally:
            self._log.end(line, scope)


def _facts(output: RequestOutput, *, with_prompt: bool) -> dict[str, Any]:
    """Of one request of the engine. Times are in seconds."""
    times = output.times
    facts: dict[str, Any] = {
        "id": output.request_id,
        "class": output.class_name,
        "prompt_tokens": output.num_prompt_tokens,
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": sum(len(one.token_ids) for one in output.outputs),
        "preemptions": output.num_preemptions,
        "queue_seconds": None,
        "first_token_seconds": None,
        "finish_reason": reason_of(output),
    }
    if times is not None and times.first_scheduled is not None:
        facts["queue_seconds"] = round(times.first_scheduled - times.arrival, 6)
    if times is not None and times.first_token is not None:
        facts["first_token_seconds"] = round(times.first_token - times.arrival, 6)
    if with_prompt:
        facts["prompt"] = output.prompt if output.prompt is not None else output.prompt_token_ids
    return facts


def _joined(ended: list[dict[str, Any]]) -> dict[str, Any]:
    """Several prompts of one HTTP request in one line: numbers are summed, times the longest, the rest listed."""
    if len(ended) < 2:
        return ended[0] if ended else {}
    joined: dict[str, Any] = {}
    for name in ended[0]:
        values = [facts[name] for facts in ended]
        if name.endswith("_seconds"):
            joined[name] = max((value for value in values if value is not None), default=None)
        elif all(isinstance(value, int) for value in values):
            joined[name] = sum(values)
        else:
            joined[name] = values[0] if len(set(map(str, values))) == 1 else values
    return joined

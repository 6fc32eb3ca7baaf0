"""`Served`: what all routes share: the engine, the settings, and whether the server takes requests.

Must not know: routes.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from dataclasses import dataclass, field
from typing import Literal

from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from octavo.async_llm import AsyncLLM
from octavo.core.errors import EngineError
from octavo.server.access_log import AccessLog
from octavo.server.block_watch import BlockWatch
from octavo.server.errors import ApiError
from octavo.server.flight import FlightRecorder
from octavo.server.settings import ServerSettings
from octavo.server.tallies import Reading, Tallies

Status = Literal["ready", "draining", "dead"]
CLASS_HEADER = "X-Octavo-Class"
READ_WAIT_S = 2.0  # how long who asks for numbers waits for a step to end


@dataclass(slots=True)
class Served:
    """One model and its server. Belongs to the event loop."""

    llm: AsyncLLM
    settings: ServerSettings
    model_names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))  # when it began to serve, as clients want to know it
    status: Status = "ready"
    reason: str = ""  # why it is not ready
    long_text: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time, so that it takes no more than one thread from others
    tallies: Tallies = field(init=False)
    flight: FlightRecorder = field(init=False)
    access_log: AccessLog = field(init=False)
    block_watch: BlockWatch = field(init=False)

    def __post_init__(self) -> None:
        engine = self.llm.built.engine
        self.tallies = Tallies(engine)
        self.flight = FlightRecorder(engine, num_steps=self.settings.flight_steps, directory=self.settings.flight_dir)
        self.access_log = AccessLog(model=self.model_names[0], log_prompts=self.settings.log_prompts)
        self.block_watch = BlockWatch()
        for observer in (self.tallies, self.flight, self.access_log):
            engine.observers.add(observer)
        self.llm.on_request = self.access_log.note

    @property
    def num_active(self) -> int:
        """Requests of /v1 that were not answered yet."""
        return self.access_log.num_active

    async def read(self) -> Reading:
        """All numbers: between two steps, or at a glance if a step takes too long to wait for."""
        engine_loop = self.llm.engine_loop
        try:
            reading: Reading = await asyncio.wait_for(self.llm.call(self.tallies.read), READ_WAIT_S)
            return reading
        except (TimeoutError, EngineError):
            # once its thread has ended nobody else touches the engine
            return (self.tallies.read if engine_loop.ended else self.tallies.glance)(engine_loop.engine)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise ApiError(
            404, f"the model {name!r} is not served here; served: {', '.join(self.model_names)}", param="model", code="model_not_found"
        )

    def check_open(self) -> None:
        """Raises ApiError 503 unless new requests are taken."""
        if self.status == "draining":
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        if self.status == "dead":
            raise ApiError(503, f"the engine has stopped: {self.reason}", code="engine_stopped")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    class_name: str


def served(request: Request) -> Served:
    """The one of the app that was called."""
    found: Served = request.app.state.served
    return found


BEARER = HTTPBearer(auto_error=False, description="one of the server's API keys, if it has any")


def authorised(
    request: Request,
    bearer: HTTPAuthorizationCredentials | None = Depends(BEARER),  # noqa: B008
    asked: str | None = Header(None, alias=CLASS_HEADER, description="the class of the request, where the API key has none of its own"),
) -> Caller:
    """Check the caller's key and tell its class. Raises ApiError 401, or 403 for a class that the key does not have."""
    settings = served(request).settings
    key = ""
    if settings.api_key:
        given = b"" if bearer is None else bearer.credentials.strip().encode("latin-1", "replace")  # as headers are decoded
        matches = [known for known in settings.api_key if hmac.compare_digest(known.encode(), given)]  # all are compared, whatever matches
        if not matches:
            raise ApiError(
                401,
                "this server wants a valid API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        key = matches[0]
    of_key = settings.classes_by_key.get(key)
    if of_key is not None and asked is not None and asked != of_key:
        raise ApiError(403, f"this API key is for class {of_key!r}, not {asked!r}", param=CLASS_HEADER)
    return Caller(of_key or asked or "default")

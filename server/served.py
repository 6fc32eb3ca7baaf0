"""`Served`: what all routes share: the engine, the settings, and whether the server takes requests.

Must not know: routes.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass, field
from typing import Literal

from fastapi import Request

from octavo.async_llm import AsyncLLM
from octavo.server.errors import ApiError
from octavo.server.settings import ServerSettings

Status = Literal["ready", "draining", "dead"]
CLASS_HEADER = "X-Octavo-Class"


@dataclass(slots=True)
class Served:
    """One model and its server. Belongs to the event loop."""

    llm: AsyncLLM
    settings: ServerSettings
    model_names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))  # when it began to serve, as clients want to know it
    status: Status = "ready"
    reason: str = ""  # why it is not ready
    num_active: int = 0  # requests of /v1 that were not answered yet

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


def authorised(request: Request) -> Caller:
    """Check the caller's key and tell its class. Raises ApiError 401, or 403 for a class that the key does not have."""
    settings = served(request).settings
    key = ""
    if settings.api_key:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip().encode()
        matches = [known for known in settings.api_key if hmac.compare_digest(known.encode(), given)]  # all are compared, whatever matches
        if scheme.lower() != "bearer" or not matches:
            raise ApiError(
                401,
                "this server wants a valid API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        key = matches[0]
    of_key, asked = settings.classes_by_key.get(key), request.headers.get(CLASS_HEADER)
    if of_key is not None and asked is not None and asked != of_key:
        raise ApiError(403, f"this API key is for class {of_key!r}, not {asked!r}", param=CLASS_HEADER)
    return Caller(of_key or asked or "default")

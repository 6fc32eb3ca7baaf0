"""What goes wrong, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}` with the status that clients act on.

Must not know: routes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from octavo.core.errors import EngineError, QueueFullError, RequestError

logger = logging.getLogger("octavo.server")

GONE = 499  # the client hung up before its answer was complete: nobody reads this status but the log
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(BaseModel):
    """The body of every answer that is none."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in TYPES if status != 405}
"""For routes to say in the OpenAPI document what may come instead of their answer."""


class ApiError(HTTPException):
    """Answer with this status. An HTTPException, which frameworks let pass wherever it is raised, reading the body included."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, _sendable(message), dict(headers or {}))
        self.status = status
        self.param = None if param is None else _sendable(param)
        self.code = code

    def __str__(self) -> str:
        return self.detail

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code or self.status}}


def _sendable(text: str) -> str:
    """Half a surrogate pair, which no encoding has, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_api_error(error: Exception) -> ApiError:
    """Which status an error of the engine has."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case RequestError():
            return ApiError(400, str(error), param=error.field)
        case EngineError():
            return ApiError(503, str(error), code="engine_stopped")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case RequestValidationError():
            return _invalid(error)
        case _:
            logger.exception("a request failed", exc_info=error)
            return ApiError(500, "the server made a mistake; its log says which")


def _invalid(error: RequestValidationError) -> ApiError:
    """The first complaint, with its place in the body: `messages[0].role`.

    Of the members of a union each complains: the one that came furthest knows best, those that came equally far say it together.
    """
    errors = error.errors()
    source, *inner = errors[0]["loc"]
    about_one = [one for one in errors if one["loc"][:2] == (source, *inner[:1])]
    places = [_steps(one, error.body) for one in about_one]
    best = max(places, key=len)
    first = about_one[places.index(best)]
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in best).removeprefix(".")
    if first["type"] == "not_served":
        return ApiError(400, f"{where}: {first['msg']}", param=where, code="unsupported_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{where} is not served by this server", param=where, code="unknown_parameter")
    said = dict.fromkeys(one["msg"] for one, place in zip(about_one, places, strict=True) if place == best)
    shared = "Input should be "
    alternatives = [message.removeprefix(shared) for message in said if message.startswith(shared)]
    message = shared + " or ".join(alternatives) if alternatives else next(iter(said))
    return ApiError(400, f"{where or 'the body'}: {message}", param=where or None)


def _steps(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """An error's place as keys and indices of the body; pydantic puts the names of a union's members between them."""
    source, *parts = error["loc"]
    if source != "body":
        return list(parts)
    steps: list[str | int] = []
    for number, part in enumerate(parts):
        within = (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int) and part < len(body))
        missing = error["type"] == "missing" and number == len(parts) - 1
        if within:
            body = body[part]
        if within or missing:
            steps.append(part)
    return steps


def _respond(request: Request, error: Exception) -> JSONResponse:
    api_error = as_api_error(error)
    if api_error.status in (404, 405) and api_error is not error:  # the router's own
        why = "this server has no such route" if api_error.status == 404 else "this route has another method"
        api_error = ApiError(api_error.status, f"{request.method} {request.url.path}: {why}", headers=api_error.headers)
    return JSONResponse(api_error.body, api_error.status, api_error.headers)


def add_handlers(app: FastAPI) -> None:
    """All errors leave the server in one form."""
    for kind in (ApiError, RequestError, EngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _respond)

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

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
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


class ApiError(Exception):
    """Answer with this status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or self.status}}


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
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            return _invalid(error)
        case _:
            logger.exception("a request failed", exc_info=error)
            return ApiError(500, "the server made a mistake; its log says which")


def _invalid(error: RequestValidationError) -> ApiError:
    """The first complaint, with its place: `messages[0].role`."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    where = ""
    for part in first["loc"][1:]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif str(part).isidentifier():  # others are the names of types in a union
            where += f".{part}" if where else str(part)
    unknown = first["type"] == "extra_forbidden"
    message = f"{where} is not served by this server" if unknown else f"{where or 'body'}: {first['msg']}"
    return ApiError(400, message, param=where or None, code="unknown_parameter" if unknown else None)


def _respond(request: Request, error: Exception) -> JSONResponse:
    api_error = as_api_error(error)
    return JSONResponse(api_error.body, api_error.status, api_error.headers)


def add_handlers(app: FastAPI) -> None:
    """All errors leave the server in one form."""
    for kind in (ApiError, RequestError, EngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _respond)

"""Bodies of requests as strict JSON: what Python's parser takes beyond the standard, or turns into something else, is refused.

NaN, numbers beyond a float, a key twice, half a character, nesting that no schema has: each is a 400 that says what and where.
Must not know: what is in the bodies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from octavo.server.errors import GONE, ApiError

MAX_BRACKETS = 100_000  # that open a list or an object: millions of them would keep the event loop, and everybody, for many seconds
MAX_DEPTH = 100  # lists and objects in each other: JSON schemas have some, and whoever reads them recursively must get through
MAX_MEMBERS = 2**16  # of one object: no field has more, and each that a schema does not know is an error of its own

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # one without an end goes to the end: no text is scanned twice


class JsonRoute(APIRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, with another request class."""
        handle, has_body = super().get_route_handler(), self.body_field is not None

        async def strict(request: Request) -> Response:
            request = _JsonRequest(request.scope, request.receive)
            if has_body:
                _check_type(request.headers.get("content-type", ""))
                try:
                    await request.body()  # is kept there
                except ClientDisconnect:  # FastAPI would take it for a bad request
                    return Response(status_code=GONE)
            return await handle(request)

        return strict


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(data: bytes) -> Any:
    """Raises ApiError 400."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _refused(f"is not UTF-8: byte {data[error.start]:#04x} at {error.start}") from error
    brackets = _brackets(text)
    if brackets > MAX_BRACKETS:
        brackets = _brackets(_STRING.sub("", text))  # those in a prompt open nothing
    if brackets > MAX_BRACKETS:
        raise _refused(f"holds {brackets:,} opening brackets, more than {MAX_BRACKETS:,}: send it in several requests")
    try:
        content = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise _refused(f"is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _refused(f"is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise _refused(f"holds a number that is too long: {error}") from error
    if brackets > MAX_DEPTH and _depth_above(content, MAX_DEPTH):
        raise _refused(f"is nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise _refused(f"holds half a surrogate pair, \\u{half:04x}: text was cut inside a character") from error
    return content


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _check_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        shown = f"not {kind!r:.80}" if kind else "and it is missing"
        raise ApiError(415, f"the body must be JSON: Content-Type must be application/json, {shown}", param="Content-Type")


def _refused(why: str) -> ApiError:
    return ApiError(400, f"the body {why}", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        raise _refused(f"holds an object with {len(pairs)} members: {MAX_MEMBERS} is the most")
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _refused(f"holds the key {twice!r:.80} twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _refused(f"is not valid JSON: {name} is no number there")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _refused(f"holds {digits:.40}, a number beyond what a float can be")
    return number


def _depth_above(content: Any, limit: int) -> bool:
    level = [content]
    for _ in range(limit):
        nested = [item.values() if type(item) is dict else item for item in level if type(item) in (dict, list)]
        level = [child for children in nested for child in children if type(child) in (dict, list)]
        if not level:
            return False
    return True

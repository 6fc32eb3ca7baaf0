"""What chat and text completions share in answering: ids, usage, running a request to its end, errors in mid-stream.

Must not know: the form of either.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from octavo.core.logprobs import Logprob
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server.errors import ApiError, ErrorBody, as_api_error
from octavo.server.openai.common_schema import PromptTokensDetails, Usage

ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503)}
UNSERVED = {
    "abort": (503, "the request was ended by the server", "aborted"),
    "timeout": (408, "the request took longer than its timeout_s", "timeout"),
    "error": (500, "the request failed", "request_failed"),
}
"""Reasons for which an output has ended that are no answers: status, message and code."""


def new_id(kind: str, asked: str | None) -> str:
    """The caller's id, or a new one."""
    return asked if asked is not None else f"{kind}-{uuid.uuid4().hex}"


def check_served(output: CompletionOutput) -> None:
    """Raises ApiError if the output ended for a reason that is no answer."""
    if output.finish_reason in UNSERVED:
        status, message, code = UNSERVED[output.finish_reason]
        raise ApiError(status, output.error or message, code=code)


async def whole(pieces: AsyncGenerator[RequestOutput]) -> RequestOutput:
    """The one output of a request that is not streamed. Raises ApiError if it has no answer."""
    answer: RequestOutput | None = None
    async with aclosing(pieces):
        async for answer in pieces:
            for output in answer.outputs:
                check_served(output)
    if answer is None:
        raise ApiError(500, "the engine gave no answer")
    return answer


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """In OpenAI's form."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: Exception) -> bytes:
    """What a client is told when the answer ends in the middle: never a silent end."""
    return event(as_api_error(error).body)


def plain_logprobs(entries: list[dict[int, Logprob] | None] | None) -> list[Any] | None:
    """By token id, as JSON has it."""
    if entries is None:
        return None
    return [None if entry is None else {str(token): asdict(value) for token, value in entry.items()} for entry in entries]

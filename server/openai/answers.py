"""What chat and text completions share in answering: ids, usage, running a request to its end, errors in mid-stream.

Must not know: the form of either.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from typing import Any

from octavo.core.errors import RequestError
from octavo.core.logprobs import Logprob
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server.errors import ApiError, as_api_error
from octavo.server.openai.common_schema import PromptTokensDetails, StreamOptions, Usage
from octavo.server.sse import DONE

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"id": "...", "choices": [...]}\n\ndata: [DONE]\n\n',
            }
        },
        "description": "The answer; with `stream`, events: `data: ` and a chunk as JSON each, then `data: [DONE]`. What goes wrong "
        'in the middle is an event `data: {"error": ...}` before it.',
    }
}
GRAMMAR = "structured_outputs"
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
    if output.finish_reason == "error" and output.error is not None and output.error.startswith(f"{GRAMMAR}: "):
        raise RequestError(output.error, field=GRAMMAR)  # it compiled, but is too much to follow: the caller's to mend
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


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """What is wrong with a grammar is told of the field of the request that it came from."""
    try:
        yield
    except RequestError as error:
        if error.field != GRAMMAR or field == GRAMMAR:
            raise
        raise RequestError(f"{field}: {str(error).removeprefix(f'{GRAMMAR}: ')}", field=field) from error


async def first_of(pieces: AsyncGenerator[RequestOutput]) -> RequestOutput:
    """The first piece of a stream. Raises ApiError if it already is the end, without an answer: that has a status of its own."""
    first = await anext(pieces)
    try:
        for output in first.outputs:
            check_served(output)
    except (ApiError, RequestError):
        await pieces.aclose()
        raise
    return first


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """In OpenAI's form."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


class Chunks:
    """The chunks of one stream: what they all begin and end with, and the usage so far."""

    def __init__(self, envelope: Mapping[str, Any], options: StreamOptions | None) -> None:
        self.made = 0  # tokens of all outputs
        self._envelope = dict(envelope)
        self._head = f"data: {_json(self._envelope)[:-1]},"
        self._last = bool(options and options.include_usage)
        self._each = bool(options and options.continuous_usage_stats)
        self._prompts: dict[int, tuple[int, int]] = {}  # of each prompt: its tokens, and how many were cached

    def saw(self, prompt: int, piece: RequestOutput) -> None:
        """What a piece tells of its prompt, which has this number."""
        self._prompts[prompt] = (piece.num_prompt_tokens, piece.num_cached_tokens)

    def choice(self, index: int, content: str, more: str = "") -> str:
        """An event with one choice; `content` is its members but the index, `more` those of the chunk, as JSON."""
        return f'{self._head}"choices":[{{"index":{index},{content}}}]{more}{self._tail}\n\n'

    @property
    def _tail(self) -> str:
        if self._each:
            return f',"usage":{self._usage().model_dump_json()}}}'
        return ',"usage":null}' if self._last else "}"

    def end(self) -> bytes:
        """What comes before [DONE]: the usage, for who asked for it."""
        return event({**self._envelope, "choices": [], "usage": self._usage().model_dump()}) if self._last else b""

    def _usage(self) -> Usage:
        seen = self._prompts.values()
        return usage(
            prompt_tokens=sum(tokens for tokens, _ in seen), completion_tokens=self.made, cached_tokens=sum(cached for _, cached in seen)
        )


async def streamed(
    chunks: Chunks, pieces: AsyncGenerator[tuple[int, RequestOutput]], write: Callable[[int, RequestOutput], Iterable[str]]
) -> AsyncGenerator[bytes]:
    """All events of a streamed answer, `[DONE]` included, whatever happens in between.

    `pieces` come with the number of their prompt; `write` makes the chunks of one.
    """
    try:
        async with aclosing(pieces) as numbered:
            async for number, piece in numbered:
                chunks.saw(number, piece)
                for output in piece.outputs:
                    check_served(output)
                if new := "".join(write(number, piece)):
                    yield new.encode()
        if end := chunks.end():
            yield end
    except Exception as error:
        yield event(as_api_error(error).body)  # never a silent end
    yield DONE


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_json(content)}\n\n".encode()


quoted = json.JSONEncoder(ensure_ascii=False).encode
"""A string as JSON; json.dumps would make an encoder for each."""


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def plain_logprobs(entries: list[dict[int, Logprob] | None] | None) -> list[Any] | None:
    """By token id, as JSON has it."""
    if entries is None:
        return None
    return [None if entry is None else {str(token): asdict(value) for token, value in entry.items()} for entry in entries]

"""POST /v1/chat/completions: a conversation in, the assistant's message out, whole or in pieces.

Must not know: how an answer is made.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from octavo.core.logprobs import Logprob
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server.errors import ApiError
from octavo.server.json_body import JsonRoute
from octavo.server.openai.answers import ERRORS, check_served, error_event, event, new_id, plain_logprobs, usage, whole
from octavo.server.openai.chat_schema import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChoiceLogprobs,
    Message,
    TokenLogprob,
    TopLogprob,
)
from octavo.server.openai.params import sampling_params, structure
from octavo.server.served import Caller, Served, authorised, served
from octavo.server.sse import DONE, EventStream, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
async def chat_completions(body: ChatCompletionRequest, request: Request, caller: Caller = Depends(authorised)) -> Response:  # noqa: B008
    """Answer a conversation; with `stream`, as server-sent events that end with `data: [DONE]`."""
    here = served(request)
    here.check_open()
    answer = Answer(here, body)
    ready = await asyncio.to_thread(here.llm.prompts.conversation, plain_messages(body.messages))
    pieces = here.llm.run(
        ready,
        answer.params,
        request_id=answer.id,
        stream=bool(body.stream),
        priority=body.priority,
        user=body.user or "",
        **{"class": caller.class_name},
    )
    if not body.stream:
        output = await unless_gone(request, whole(pieces))
        return Response(status_code=499) if output is None else Response(answer.whole(output), media_type="application/json")
    first = await unless_gone(request, anext(pieces))  # what is refused has a status of its own
    return Response(status_code=499) if first is None else EventStream(answer.events(first, pieces))


class Answer:
    """The answer to one request, in OpenAI's form."""

    def __init__(self, here: Served, body: ChatCompletionRequest) -> None:
        """Raises RequestError, or ApiError, for what cannot be served."""
        if body.max_tokens is not None and body.max_completion_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs = true", param="top_logprobs")
        self.model = here.check_model(body.model)
        self.id = new_id("chatcmpl", body.request_id)
        self.created = int(time.time())
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        self.params, self.copies = sampling_params(
            body,
            defaults={"max_tokens": None},
            settings=here.settings,
            max_tokens=limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=structure(body, body.response_format),
        )
        self._options = body.stream_options
        self._wants_ids = bool(body.return_token_ids)

    # ------------------------------------------------------------------ at once

    def whole(self, output: RequestOutput) -> bytes:
        """The body of an answer that is not streamed."""
        outputs = output.outputs * self.copies
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(number, one) for number, one in enumerate(outputs)],
            usage=usage(
                prompt_tokens=output.num_prompt_tokens,
                completion_tokens=sum(len(one.token_ids) for one in outputs),
                cached_tokens=output.num_cached_tokens,
            ),
            prompt_logprobs=plain_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self._wants_ids else None,
        )
        return answer.model_dump_json().encode()

    def _choice(self, number: int, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=number,
            message=AnswerMessage(content=output.text),
            logprobs=_logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._wants_ids else None,
        )

    # ----------------------------------------------------------------- in pieces

    async def events(self, first: RequestOutput, rest: AsyncGenerator[RequestOutput]) -> AsyncGenerator[bytes]:
        """All events of a streamed answer, `[DONE]` included, whatever happens in between."""
        head = self._head()
        with_usage = bool(self._options and self._options.include_usage)
        tail = ',"usage":null}\n\n' if with_usage else "}\n\n"
        made, cached, begun = 0, 0, set[int]()
        try:
            async with aclosing(_chain(first, rest)) as pieces:
                async for piece in pieces:
                    cached = piece.num_cached_tokens
                    chunks = []
                    for output in piece.outputs:
                        check_served(output)
                        made += len(output.token_ids) * self.copies
                        for number in range(output.index, output.index + self.copies):
                            if number not in begun:
                                begun.add(number)
                                chunks.append(
                                    f'{head}{number},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]{tail}'
                                )
                            if output.text or output.token_ids or output.finish_reason:
                                chunks.append(f"{head}{number},{self._delta(output)}}}]{tail}")
                    yield "".join(chunks).encode()
            if with_usage:
                total = usage(prompt_tokens=first.num_prompt_tokens, completion_tokens=made, cached_tokens=cached)
                yield event({**self._envelope(), "choices": [], "usage": total.model_dump()})
        except Exception as error:
            yield error_event(error)
        yield DONE

    def _envelope(self) -> dict[str, Any]:
        return {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model, "system_fingerprint": None}

    def _head(self) -> str:
        """What every chunk begins with, up to the index of its choice."""
        return f'data: {json.dumps(self._envelope(), separators=(",", ":"))[:-1]},"choices":[{{"index":'

    def _delta(self, output: CompletionOutput) -> str:
        logprobs = _logprobs(output)
        told = "null" if logprobs is None else logprobs.model_dump_json()
        parts = [
            f'"delta":{{"content":{json.dumps(output.text, ensure_ascii=False)}}}' if output.text else '"delta":{}',
            f'"logprobs":{told},"finish_reason":{json.dumps(output.finish_reason)}',
        ]
        if output.finish_reason:
            parts.append(f'"stop_reason":{json.dumps(output.stop_reason)}')
        if self._wants_ids:
            parts.append(f'"token_ids":{json.dumps(output.token_ids)}')
        return ",".join(parts)


async def _chain(first: RequestOutput, rest: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
    async with aclosing(rest) as pieces:
        yield first
        async for piece in pieces:
            yield piece


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """As chat templates want them. Raises ApiError."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates want it: text in one string, a call's arguments as an object."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    plain.setdefault("content", "")
    for call in plain.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError as error:
            raise ApiError(400, f"the arguments of a tool call are not valid JSON: {error}", param="messages") from error
    return plain


def _logprobs(output: CompletionOutput) -> ChoiceLogprobs | None:
    if output.logprobs is None:
        return None
    content = []
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        ranked = sorted(entry.items(), key=lambda item: (item[1].rank, item[0]))
        top = [_top(value) for token, value in ranked if token != token_id or len(entry) > 1]
        content.append(TokenLogprob(**_top(entry[token_id]).model_dump(), top_logprobs=top))
    return ChoiceLogprobs(content=content)


def _top(value: Logprob) -> TopLogprob:
    text = value.decoded_token or ""
    return TopLogprob(token=text, logprob=value.logprob, bytes=list(text.encode("utf-8", "replace")))

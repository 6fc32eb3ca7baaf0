"""POST /v1/completions: one or more prompts in, their continuations out, whole or in pieces.

Must not know: how an answer is made.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from octavo.core.logprobs import Logprob
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.prompts import ReadyPrompt
from octavo.server.errors import ApiError
from octavo.server.json_body import JsonRoute
from octavo.server.openai.answers import ERRORS, check_served, error_event, event, new_id, plain_logprobs, usage, whole
from octavo.server.openai.completions_schema import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from octavo.server.openai.params import sampling_params, structure
from octavo.server.served import Caller, Served, authorised, served
from octavo.server.sse import DONE, EventStream, unless_gone

router = APIRouter(route_class=JsonRoute)
MOST_PROMPTS = 1024  # in one request


@router.post("/v1/completions", response_model=Completion, responses=ERRORS)
async def completions(body: CompletionRequest, request: Request, caller: Caller = Depends(authorised)) -> Response:  # noqa: B008
    """Continue prompts; with `stream`, as server-sent events that end with `data: [DONE]`."""
    here = served(request)
    here.check_open()
    answer = Answer(here, body)
    prompts = await asyncio.to_thread(answer.read, body.prompt)
    about = {"priority": body.priority, "user": body.user or "", "class": caller.class_name}
    runs = [
        here.llm.run(
            ready,
            answer.params,
            request_id=answer.id if len(prompts) == 1 else f"{answer.id}-{number}",
            stream=bool(body.stream),
            **about,
        )
        for number, ready in enumerate(prompts)
    ]
    if not body.stream:
        outputs = await unless_gone(request, _all_whole(runs))
        return Response(status_code=499) if outputs is None else Response(answer.whole(outputs), media_type="application/json")
    firsts = await unless_gone(request, _all_first(runs))  # what is refused has a status of its own
    return Response(status_code=499) if firsts is None else EventStream(answer.events(firsts, runs))


async def _all_whole(runs: Sequence[AsyncGenerator[RequestOutput]]) -> list[RequestOutput]:
    return await _all([whole(run) for run in runs], runs)


async def _all_first(runs: Sequence[AsyncGenerator[RequestOutput]]) -> list[RequestOutput]:
    return await _all([anext(run) for run in runs], runs)


async def _all(work: Sequence[Awaitable[RequestOutput]], runs: Sequence[AsyncGenerator[RequestOutput]]) -> list[RequestOutput]:
    """All or nothing: if one fails, or the client has gone, no run goes on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await _cancelled(tasks)
        for run in runs:
            await run.aclose()
        raise


@dataclass(slots=True)
class _Column:
    """How far the text of one choice has come, for the offsets of its tokens."""

    length: int = 0


class Answer:
    """The answer to one request, in OpenAI's form."""

    def __init__(self, here: Served, body: CompletionRequest) -> None:
        """Raises RequestError, or ApiError, for what cannot be served."""
        self._echo = bool(body.echo)
        self._nothing_new = body.max_tokens == 0
        if self._nothing_new and not self._echo:
            raise ApiError(400, "max_tokens = 0: nothing would come back; only with echo = true", param="max_tokens")
        if self._echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs cannot be streamed", param="echo")
        self.model = here.check_model(body.model)
        self.id = new_id("cmpl", body.request_id)
        self.created = int(time.time())
        self.params, self.copies = sampling_params(
            body,
            defaults={"max_tokens": 16},
            settings=here.settings,
            max_tokens=1 if self._nothing_new else body.max_tokens,
            best_of=body.best_of,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if self._echo and body.prompt_logprobs is None else body.prompt_logprobs,
            structured_outputs=structure(body, body.response_format),
        )
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._logprobs = body.logprobs
        self._options = body.stream_options
        self._wants_ids = bool(body.return_token_ids)
        self._special = body.add_special_tokens
        self._here = here

    def read(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[ReadyPrompt]:
        """All prompts, as token ids. Raises RequestError that names the one to blame."""
        many: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not 0 < len(many) <= MOST_PROMPTS:
            raise ApiError(400, f"prompt holds {len(many)} prompts: must be 1 to {MOST_PROMPTS}", param="prompt")
        reader = self._here.llm.prompts
        ready = []
        for one in many:
            if isinstance(one, str):
                ready.append(ReadyPrompt(reader.tokenizer.encode(one, add_special_tokens=self._special), one, {}))
            else:
                ready.append(reader.prompt({"prompt_token_ids": one}))
        return ready

    # ------------------------------------------------------------------ at once

    def whole(self, answers: list[RequestOutput]) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._choice(answer, output) for answer in answers for output in answer.outputs * self.copies]
        made = 0 if self._nothing_new else sum(len(o.token_ids) for answer in answers for o in answer.outputs) * self.copies
        body = Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[choice.model_copy(update={"index": number}) for number, choice in enumerate(choices)],
            usage=usage(
                prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
                completion_tokens=made,
                cached_tokens=sum(answer.num_cached_tokens for answer in answers),
            ),
        )
        return body.model_dump_json().encode()

    def _choice(self, answer: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        if self._nothing_new:
            output = replace(output, text="", token_ids=[], finish_reason="length", stop_reason=None, logprobs=output.logprobs and [])
        return CompletionChoice(
            index=0,
            text=self._prompt_text(answer) + output.text,
            logprobs=self._columns(answer, output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=plain_logprobs(answer.prompt_logprobs) if self._wants_prompt_logprobs else None,
            token_ids=output.token_ids if self._wants_ids else None,
            prompt_token_ids=answer.prompt_token_ids if self._wants_ids else None,
        )

    def _prompt_text(self, answer: RequestOutput) -> str:
        if not self._echo:
            return ""
        if answer.prompt is not None and self.params.truncate_prompt_tokens is None:
            return answer.prompt
        return self._here.llm.prompts.tokenizer.decode(answer.prompt_token_ids)

    def _columns(self, answer: RequestOutput, output: CompletionOutput) -> CompletionLogprobs | None:
        if output.logprobs is None:
            return None
        ids: list[int] = output.token_ids
        entries: list[dict[int, Logprob] | None] = list(output.logprobs)
        if self._echo and answer.prompt_logprobs is not None:
            ids, entries = [*answer.prompt_token_ids, *ids], [*answer.prompt_logprobs, *entries]
        return self._table(ids, entries, _Column())

    def _table(self, ids: Sequence[int], entries: Sequence[dict[int, Logprob] | None], at: _Column) -> CompletionLogprobs:
        """Tokens with their offsets in the text of the tokens one by one."""
        decode = self._here.llm.prompts.tokenizer.decode_token
        table = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[] if self._logprobs else None)
        for token_id, entry in zip(ids, entries, strict=True):
            text = decode(token_id)
            table.tokens.append(text)
            table.text_offset.append(at.length)
            at.length += len(text)
            table.token_logprobs.append(None if entry is None else entry[token_id].logprob)
            if table.top_logprobs is not None:
                table.top_logprobs.append(None if entry is None else {decode(token): value.logprob for token, value in entry.items()})
        return table

    # ----------------------------------------------------------------- in pieces

    async def events(self, firsts: list[RequestOutput], runs: list[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[bytes]:
        """All events of a streamed answer, `[DONE]` included, whatever happens in between."""
        with_usage = bool(self._options and self._options.include_usage)
        head, tail = self._head(), ',"usage":null}\n\n' if with_usage else "}\n\n"
        prompt_tokens, made, cached = sum(first.num_prompt_tokens for first in firsts), 0, [0] * len(runs)
        width = self.params.n * self.copies
        columns: dict[int, _Column] = {}
        try:
            async with aclosing(_merged(firsts, runs)) as pieces:
                async for number, piece in pieces:
                    cached[number] = piece.num_cached_tokens
                    chunks = []
                    for output in piece.outputs:
                        check_served(output)
                        made += len(output.token_ids) * self.copies
                        for index in range(number * width + output.index, number * width + output.index + self.copies):
                            column = columns.setdefault(index, _Column())
                            text = output.text
                            if self._echo and piece is firsts[number]:
                                text = self._prompt_text(piece) + text
                            chunks.append(f"{head}{index},{self._delta(output, text, column)}}}]{tail}")
                    yield "".join(chunks).encode()
            if with_usage:
                total = usage(prompt_tokens=prompt_tokens, completion_tokens=made, cached_tokens=sum(cached))
                yield event({**self._envelope(), "choices": [], "usage": total.model_dump()})
        except Exception as error:
            yield error_event(error)
        yield DONE

    def _envelope(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "system_fingerprint": None}

    def _head(self) -> str:
        """What every chunk begins with, up to the index of its choice."""
        return f'data: {json.dumps(self._envelope(), separators=(",", ":"))[:-1]},"choices":[{{"index":'

    def _delta(self, output: CompletionOutput, text: str, column: _Column) -> str:
        told = "null"
        if output.logprobs is not None:
            told = self._table(output.token_ids, output.logprobs, column).model_dump_json()
        parts = [f'"text":{json.dumps(text, ensure_ascii=False)},"logprobs":{told},"finish_reason":{json.dumps(output.finish_reason)}']
        if output.finish_reason:
            parts.append(f'"stop_reason":{json.dumps(output.stop_reason)}')
        if self._wants_ids:
            parts.append(f'"token_ids":{json.dumps(output.token_ids)}')
        return ",".join(parts)


async def _merged(firsts: list[RequestOutput], runs: list[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The pieces of all prompts as they come, each with the number of its prompt."""
    queue: asyncio.Queue[tuple[int, RequestOutput | None, BaseException | None]] = asyncio.Queue()

    async def read(number: int) -> None:
        try:
            queue.put_nowait((number, firsts[number], None))
            async for piece in runs[number]:
                queue.put_nowait((number, piece, None))
            queue.put_nowait((number, None, None))
        except Exception as error:
            queue.put_nowait((number, None, error))

    async with AsyncExitStack() as stack:
        for run in runs:
            await stack.enter_async_context(aclosing(run))
        readers = [asyncio.ensure_future(read(number)) for number in range(len(runs))]
        stack.push_async_callback(_cancelled, readers)
        left = len(runs)
        while left:
            number, piece, error = await queue.get()
            if error is not None:
                raise error
            if piece is None:
                left -= 1
            else:
                yield number, piece


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

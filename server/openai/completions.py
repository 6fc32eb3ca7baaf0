"""POST /v1/completions: one or more prompts in, their continuations out, whole or in pieces.

Must not know: how an answer is made, or written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from octavo.core.errors import RequestError
from octavo.core.outputs import RequestOutput
from octavo.prompts import PromptReader, ReadyPrompt
from octavo.server.errors import ERRORS, GONE, ApiError
from octavo.server.json_body import JsonRoute
from octavo.server.openai.answers import STREAMED, blaming, first_of, whole
from octavo.server.openai.completions_answer import CompletionAnswer
from octavo.server.openai.completions_schema import Completion, CompletionRequest
from octavo.server.served import Caller, authorised, served
from octavo.server.sse import EventStream, unless_gone

router = APIRouter(route_class=JsonRoute)
MOST_PROMPTS = 1024  # in one request


@router.post("/v1/completions", response_model=Completion, responses=ERRORS | STREAMED)
async def completions(body: CompletionRequest, request: Request, caller: Caller = Depends(authorised)) -> Response:  # noqa: B008
    """Continue prompts; with `stream`, as server-sent events that end with `data: [DONE]`."""
    here = served(request)
    here.check_open()
    answer = CompletionAnswer(here, body)
    prompts = await asyncio.to_thread(_read, here.llm.prompts, body)
    about: dict[str, Any] = {"priority": body.priority, "user": body.user or "", "class": caller.class_name}
    runs = [
        here.llm.run(
            ready,
            answer.wanted.params,
            request_id=answer.id if len(prompts) == 1 else f"{answer.id}-{number}",
            stream=bool(body.stream),
            **about,
        )
        for number, ready in enumerate(prompts)
    ]
    with blaming(answer.grammar_field):
        if not body.stream:
            outputs = await unless_gone(request, _all([whole(run) for run in runs], runs))
            return Response(status_code=GONE) if outputs is None else answer.response(answer.whole(outputs))
        firsts = await unless_gone(request, _all([first_of(run) for run in runs], runs))  # what is refused has a status of its own
    if firsts is None:
        return Response(status_code=GONE)
    return EventStream(answer.events(firsts, runs, prompts), sources=runs, headers=answer.headers)


def _read(reader: PromptReader, body: CompletionRequest) -> list[ReadyPrompt]:
    """All prompts, as token ids. Raises RequestError, or ApiError, that names the one to blame."""
    prompt: Any = body.prompt
    many = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not 0 < len(many) <= MOST_PROMPTS:
        raise ApiError(400, f"prompt holds {len(many)} prompts: must be 1 to {MOST_PROMPTS}", param="prompt")
    ready = []
    for number, one in enumerate(many):
        try:
            if isinstance(one, str):
                ready.append(ReadyPrompt(reader.encode(one, add_special_tokens=body.add_special_tokens), one, {}))
            else:
                ready.append(reader.prompt({"prompt_token_ids": one}))
        except RequestError as error:
            where = f"prompt[{number}]: " if len(many) > 1 else ""
            raise RequestError(f"{where}{error}", field="prompt") from error
    return ready


async def _all(work: Sequence[Awaitable[RequestOutput]], runs: Sequence[AsyncGenerator[RequestOutput]]) -> list[RequestOutput]:
    """All or nothing: if one fails, or the client has gone, no run goes on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in runs:
            await run.aclose()
        raise

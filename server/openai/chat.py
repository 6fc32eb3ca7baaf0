"""POST /v1/chat/completions: a conversation in, the assistant's message out, whole or in pieces.

Must not know: how an answer is made, or written.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from octavo.server.errors import ERRORS, GONE
from octavo.server.json_body import JsonRoute
from octavo.server.openai.answers import STREAMED, blaming, first_of, whole
from octavo.server.openai.chat_answer import ChatAnswer
from octavo.server.openai.chat_schema import ChatCompletion, ChatCompletionRequest
from octavo.server.openai.messages import plain_messages
from octavo.server.served import Caller, authorised, served
from octavo.server.sse import EventStream, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS | STREAMED)
async def chat_completions(body: ChatCompletionRequest, request: Request, caller: Caller = Depends(authorised)) -> Response:  # noqa: B008
    """Answer a conversation; with `stream`, as server-sent events that end with `data: [DONE]`."""
    here = served(request)
    here.check_open()
    answer = ChatAnswer(here, body)
    tools = answer.tools.shown if answer.tools is not None else None
    ready = await asyncio.to_thread(
        here.llm.prompts.conversation, plain_messages(body.messages), tools, add_generation_prompt=body.add_generation_prompt
    )
    about: dict[str, Any] = {"priority": body.priority, "user": body.user or "", "class": caller.class_name}
    pieces = here.llm.run(ready, answer.wanted.params, request_id=answer.id, stream=bool(body.stream), **about)
    with blaming(answer.grammar_field):
        if not body.stream:
            output = await unless_gone(request, whole(pieces))
            return Response(status_code=GONE) if output is None else answer.response(answer.whole(output))
        first = await unless_gone(request, first_of(pieces))  # what is refused has a status of its own
    if first is None:
        return Response(status_code=GONE)
    return EventStream(answer.events(first, pieces, ready), sources=[pieces], headers=answer.headers)

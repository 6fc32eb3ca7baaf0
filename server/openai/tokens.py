"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, as in vLLM.

Must not know: engines.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from octavo.async_llm import LONG_TEXT
from octavo.server.errors import ERRORS, ApiError
from octavo.server.json_body import JsonRoute
from octavo.server.openai.chat_schema import Message
from octavo.server.openai.common_schema import Flag, Items, Schema, Whole
from octavo.server.openai.messages import plain_messages
from octavo.server.served import authorised, served

router = APIRouter(route_class=JsonRoute, dependencies=[Depends(authorised)])


class TokenizeRequest(Schema):
    """A text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: Flag = True
    return_token_strs: Flag = False


class Tokenized(BaseModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Schema):
    """Token ids."""

    model: str | None = None
    tokens: Items[Whole]


class Detokenized(BaseModel):
    """Their text."""

    prompt: str


@router.post("/tokenize", responses=ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
    """The ids that a prompt has in the engine."""
    here = served(request)
    here.check_model(body.model)
    prompts = here.llm.prompts

    def ids() -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            return prompts.conversation(plain_messages(body.messages)).token_ids
        return prompts.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)

    def work() -> Tokenized:
        tokens = ids()
        texts = [prompts.tokenizer.decode_token(token) for token in tokens] if body.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=here.llm.built.engine.max_model_len, tokens=tokens, token_strs=texts)

    if len(body.prompt or "") <= LONG_TEXT:
        return await asyncio.to_thread(work)
    async with here.long_text:
        return await asyncio.to_thread(work)


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
    """The text of token ids, special tokens too."""
    here = served(request)
    here.check_model(body.model)
    size = here.llm.built.engine.vocab_size
    strange: Any = next((token for token in body.tokens if not 0 <= token < size), None)
    if strange is not None:
        raise ApiError(400, f"token id {strange} is outside the vocabulary (0..{size - 1})", param="tokens")
    text = await asyncio.to_thread(lambda: here.llm.prompts.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return Detokenized(prompt=text)

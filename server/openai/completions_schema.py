"""Requests and answers of /v1/completions, as OpenAI documents them.

Must not know: engines, tokenizers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from octavo.server.openai.common_schema import Flag, Items, ResponseFormat, SamplingFields, Usage, Whole
from octavo.server.openai.not_served import NotServed


class CompletionRequest(SamplingFields):
    """One or more prompts, as text or token ids, to go on with."""

    prompt: str | Items[Whole] | Items[str] | Items[Items[Whole]]
    model: str | None = Field(None, description="a served model's name; absent: the one that is served")
    max_tokens: Whole | None = Field(None, ge=0, description="most tokens of one output; absent: 16; 0 only with echo")
    best_of: Whole | None = Field(None, description="outputs to sample, of which the n likeliest are given")
    echo: Flag | None = Field(None, description="give the prompt before its continuation")
    logprobs: Whole | None = Field(None, ge=0, description="give each token's log probability and those of so many likeliest ones")
    response_format: ResponseFormat | None = None
    suffix: Annotated[None, NotServed("this server continues prompts: it fills no gaps")] = None
    add_special_tokens: Flag = Field(True, description="put BOS and the like before a text, where the tokenizer has them")


class CompletionLogprobs(BaseModel):
    """Of an output's tokens, in columns."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(BaseModel):
    """One output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = Field(None, description="the stop string or stop id that was met")
    prompt_logprobs: list[Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """All outputs of all prompts."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = None


class CompletionChunkChoice(BaseModel):
    """What is new of one output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = Field(None, description="in the first chunk of a choice alone")
    prompt_token_ids: list[int] | None = Field(None, description="in the first chunk of a choice alone")


class CompletionChunk(BaseModel):
    """One event of streamed outputs. The last one may have usage and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None

"""Answers held against the types of OpenAI's own package, strictly."""

from __future__ import annotations

import json
from typing import Any

from openai import BaseModel as OpenAIModel
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from octavo.server.openai import chat_schema as schema, completions_schema as text_schema

OURS = {"prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason"}
"""What Octavo's answers have beside OpenAI's, as vLLM's have."""


OWN: dict[str, type[BaseModel]] = {
    "chat.completion": schema.ChatCompletion,
    "chat.completion.chunk": schema.ChatCompletionChunk,
    "text_completion": text_schema.CompletionChunk,
}
"""The types that our OpenAPI document is made from: they allow nothing else."""


def chat(body: Any) -> Any:
    """The body, if it is a valid chat completion."""
    return _valid(ChatCompletion, body, body)


def chat_chunk(body: Any) -> Any:
    """The body, if it is a valid chunk of one."""
    return _valid(ChatCompletionChunk, body, body)


def completion(body: Any) -> Any:
    """The body, if it is a valid text completion."""
    return _valid(Completion, body, _as_declared(body))


def completion_chunk(body: Any) -> Any:
    """The same of a chunk, which the package reads as a completion although nothing has ended yet: there it is null."""
    declared = _as_declared(body)
    for choice in declared["choices"]:
        assert "finish_reason" in choice
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    return _valid(Completion, body, declared)


def _as_declared(body: Any) -> Any:
    """With `echo`, OpenAI gives null for the first token's log probabilities; its types forget that."""
    declared = json.loads(json.dumps(body))
    for choice in declared["choices"]:
        for name in ("token_logprobs", "top_logprobs"):
            column = (choice.get("logprobs") or {}).get(name)
            if column and column[0] is None:
                column[0] = 0.0 if name == "token_logprobs" else {}
    return declared


def _valid(kind: type[OpenAIModel], body: Any, declared: Any) -> Any:
    OWN[body["object"]].model_validate_json(json.dumps(body), strict=True, extra="forbid")
    model = kind.model_validate_json(json.dumps(declared), strict=True)
    _only_known(model)
    for choice in model.choices:  # type: ignore[attr-defined]
        _only_known(choice)
    return body


def _only_known(model: OpenAIModel) -> None:
    assert set(model.model_extra or {}) <= OURS, model.model_extra

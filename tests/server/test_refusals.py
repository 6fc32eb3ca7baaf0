"""Requests that cannot be served: 400 at once, in OpenAI's form, with the field to blame and the reason; the engine goes on."""

from __future__ import annotations

from typing import Any, get_type_hints

import httpx2
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from octavo.server.openai.chat_schema import ChatCompletionRequest
from octavo.server.openai.completions_schema import CompletionRequest
from tests.server.conftest import ENGINE
from tests.server.test_bodies import CHAT, refusal

TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
LIMIT = ENGINE["max_model_len"]

# (body beside the prompt, the field to blame, what the message says)
Case = tuple[dict[str, Any], str, str]

BOTH: list[Case] = [
    ({"temperature": -0.1}, "temperature", "from 0"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"temperature": [1]}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "-1 or above"),
    ({"top_k": 2.0}, "top_k", "valid integer"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"seed": "1"}, "seed", "valid integer"),
    ({"n": 0}, "n", "1 to 64"),
    ({"n": 65}, "n", "1 to 64"),
    ({"n": 65, "temperature": 0}, "n", "1 to 64"),
    ({"n": True}, "n", "valid integer"),
    ({"max_tokens": -1}, "max_tokens", ""),
    ({"max_tokens": 10**30}, "max_tokens", "1 or above"),
    ({"max_tokens": 10_000}, "max_tokens", f"exceed max_model_len {LIMIT}"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens", "at most max_tokens"),
    ({"stop": ""}, "stop", "1 to 256 characters"),
    ({"stop": ["a", 5]}, "stop[1]", "valid string"),
    ({"stop": 5}, "stop", "valid string or a valid list"),
    ({"stop": ["a"] * 33}, "stop", "up to 32 strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids[0] = -1"),
    ({"stop_token_ids": [384]}, "stop_token_ids", "384"),
    ({"logit_bias": {"384": 1}}, "logit_bias", "384"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "valid number"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ""),
    ({"logit_bias": [1]}, "logit_bias", "dictionary"),
    ({"allowed_token_ids": [384]}, "allowed_token_ids", "384"),
    ({"bad_words": [""]}, "bad_words", "bad_words[0]"),
    ({"prompt_logprobs": 1001}, "prompt_logprobs", "0 to 1,000"),
    ({"timeout_s": 0}, "timeout_s", "above 0"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or above"),
    ({"priority": 2**40}, "priority", ""),
    ({"request_id": ""}, "request_id", "at least 1 character"),
    ({"user": 5}, "user", "valid string"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not served"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "not served"),
    ({"temprature": 1}, "temprature", "not served"),
    ({"model": 5}, "model", "valid string"),
]
CHAT_ONLY: list[Case] = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": {}}, "messages", "valid list"),
    ({"messages": None}, "messages", "valid list"),
    ({"messages": [5]}, "messages[0]", "dictionary"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string or a valid list"),
    ({"messages": [*HELLO, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text", "required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "text only",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages[0].content[0]", "text only"),
    ({"messages": [{"role": "user", "content": "a", "mood": "good"}]}, "messages[0].mood", "not served"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]}, "messages[0].function_call", "tool_calls"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", "differ"),
    ({"max_tokens": 0}, "max_tokens", "1 or above"),
    ({"logprobs": 1}, "logprobs", "valid boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs = true"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
    ({"audio": {"voice": "x", "format": "mp3"}}, "audio", "no sound"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": "auto"}, "function_call", "use tool_choice"),
    ({"web_search_options": {}}, "web_search_options", "web"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning"),
    ({"verbosity": "low"}, "verbosity", "verbosity"),
    ({"store": True}, "store", "stores no answers"),
    ({"moderation": {"model": "x"}}, "moderation", "moderates nothing"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
]
TEXT_ONLY: list[Case] = [
    ({"prompt": None}, "prompt", "valid string or a valid list"),
    ({"prompt": 5}, "prompt", "valid string or a valid list"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "1 to 1024"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": ["a"] * 1025}, "prompt", "1025 prompts"),
    ({"prompt": [1, 2, 384]}, "prompt", "384 is outside the vocabulary"),
    ({"prompt": [-1]}, "prompt", "-1 is outside the vocabulary"),
    ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
    ({"prompt": [True]}, "prompt[0]", ""),
    ({"prompt": [1.5]}, "prompt[0]", ""),
    ({"prompt": [1, "a"]}, "prompt[1]", ""),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]", "valid integer"),
    ({"prompt": {"prompt_token_ids": [1]}}, "prompt", "valid list"),
    ({"prompt": "a" * LIMIT}, "prompt", f"{LIMIT} tokens, max_model_len is {LIMIT}"),
    ({"prompt": [7] * 100_000}, "prompt", f"100000 tokens, max_model_len is {LIMIT}"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"logprobs": -1}, "logprobs", "0"),
    ({"best_of": 1, "n": 2}, "best_of", "at least n"),
    ({"best_of": 1, "n": 2, "temperature": 0}, "best_of", "at least n"),
    ({"best_of": 3, "stream": True}, "best_of", "cannot be streamed"),
    ({"suffix": "b"}, "suffix", "fills no gaps"),
    ({"messages": HELLO}, "messages", "not served"),
]


def shown(case: Any) -> str:
    return str(case)[:60]


@pytest.mark.parametrize("case", [*BOTH, *CHAT_ONLY], ids=shown)
def test_chat(http: httpx2.Client, case: Case) -> None:
    """Named, explained, and the engine goes on (faults 23, 25, 26, 27)."""
    fields, where, why = case
    error = refusal(http.post(CHAT, json={"messages": HELLO, **fields}))
    assert error["param"] == where and why in error["message"], error
    assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("case", [*BOTH, *TEXT_ONLY], ids=shown)
def test_completions(http: httpx2.Client, case: Case) -> None:
    """Named, explained, and the engine goes on (faults 23, 24, 25, 26, 27)."""
    fields, where, why = case
    error = refusal(http.post(TEXT, json={"prompt": "a", **fields}))
    assert error["param"] == where and why in error["message"], error
    assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_streams_are_refused_with_a_status_too(http: httpx2.Client, stream: bool) -> None:
    """What the engine refuses is no stream with an error in it."""
    assert refusal(http.post(TEXT, json={"prompt": [384], "stream": stream}))["param"] == "prompt"
    assert refusal(http.post(CHAT, json={"messages": HELLO, "max_tokens": 999, "stream": stream}))["param"] == "max_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}, "store": False, "service_tier": "flex", "modalities": ["text"], "safety_identifier": "x"},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "prompt_cache_options": {}, "user": "me", "parallel_tool_calls": True},
        {"prediction": {"type": "content", "content": "x"}, "reasoning_effort": "none", "tool_choice": "none", "tools": None},
        {"messages": [{"role": "assistant", "content": "a", "refusal": None, "audio": None, "annotations": [], "function_call": None}]},
        {name: None for name in ChatCompletionRequest.model_fields if name not in ("messages", "add_generation_prompt")},
    ],
    ids=shown,
)
def test_what_changes_nothing_is_taken(http: httpx2.Client, fields: dict[str, Any]) -> None:
    """Fields without effect on the answer, and null for any that may be left out."""
    answer = http.post(CHAT, json={"messages": HELLO, "seed": 1, **fields, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_all_of_openais_fields_are_known() -> None:
    """Each field that OpenAI's own package knows is declared: served, taken without effect, or refused with a reason."""
    chat = set(get_type_hints(chat_params.CompletionCreateParamsStreaming))
    text = set(get_type_hints(text_params.CompletionCreateParamsStreaming))
    assert {"messages", "tools", "stream"} <= chat and {"prompt", "best_of", "stream"} <= text  # that this test looks at something
    assert chat <= set(ChatCompletionRequest.model_fields)
    assert text <= set(CompletionRequest.model_fields)

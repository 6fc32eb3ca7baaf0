"""A real model with tools: forced, it calls one rightly; free, its answer has the standard form whatever it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest

from octavo.async_llm import AsyncLLM
from tests.server.conftest import Loop, opened
from tests.server.test_chat import ask, stream
from tests.server.test_tools import TOOLS, WEATHER, functions, gathered, named

pytestmark = pytest.mark.slow
MESSAGES: Any = [{"role": "user", "content": "What will the weather be in Oslo for the next 3 days?"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 80}


@pytest.fixture(scope="module")
def shared_engine(loop: Loop) -> Iterator[AsyncLLM]:
    """SmolLM2 in fp32."""
    llm = loop.run(opened(model="smollm2-135m", device="cpu", dtype="float32", max_model_len=1024, num_kv_slots=4096))
    yield llm
    loop.run(llm.close())


def test_a_named_call(http: httpx2.Client) -> None:
    """The right tool, arguments as its schema wants them, and of the question."""
    (choice,) = ask(http, **ASKED, tool_choice=named("weather"))["choices"]
    ((name, arguments),) = functions(choice["message"]["tool_calls"])
    assert name == "weather" and choice["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(arguments), WEATHER)
    assert json.loads(arguments)["city"] == "Oslo"
    assert functions(gathered(stream(http, **ASKED, tool_choice=named("weather")))[1]) == [(name, arguments)]


def test_a_required_call(http: httpx2.Client) -> None:
    """One of the tools."""
    (choice,) = ask(http, **ASKED, tool_choice="required", parallel_tool_calls=False)["choices"]
    ((name, arguments),) = functions(choice["message"]["tool_calls"])
    assert name in ("weather", "now")
    jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object", "maxProperties": 0})


def test_a_free_answer(http: httpx2.Client) -> None:
    """Whole and streamed say the same, and something."""
    (choice,) = ask(http, **ASKED)["choices"]
    content, calls, reason = gathered(stream(http, **ASKED))
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == (content, reason)
    assert functions(choice["message"]["tool_calls"]) == functions(calls)
    assert content or calls

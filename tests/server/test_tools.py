"""Tools in chat completions: told to the model, forced by a grammar or found in what it writes, and given in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.text.chat_template import ChatTemplate
from tests.server import validity
from tests.server.conftest import Script
from tests.server.test_bodies import CHAT, refusal
from tests.server.test_chat import HELLO, ask, stream

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


def tool(name: str, parameters: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


STRICT_TOOLS: list[Any] = [tool("weather", WEATHER, strict=True), tool("now", None)]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "Paris", "days": 2}'


@pytest.fixture
def shared_engine(wide_engine: AsyncLLM) -> AsyncLLM:
    """What the template says of tools is long, at a token a byte."""
    return wide_engine


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def gathered(chunks: list[Any]) -> tuple[str, list[Any], str]:
    """Content, calls and finish reason of a stream of one choice. A call's first piece has its id and name, and it alone."""
    content, calls, reason = "", list[Any](), None
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(calls):
                    assert piece["type"] == "function" and piece["id"] and piece["function"]["name"]
                    calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
                else:
                    assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    assert isinstance(reason, str)
    return content, calls, reason


def functions(calls: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls or []]


@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        (CALL, None, [("weather", ARGUMENTS)], "tool_calls"),
        ("I look.\n" + CALL + "\n" + CALL, "I look.", [("weather", ARGUMENTS)] * 2, "tool_calls"),
        ('{"name": "now", "parameters": {}}', None, [("now", "{}")], "tool_calls"),
        ("No need: é 😀.", "No need: é 😀.", [], "stop"),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', [], "stop"),
        ("", "", [], "stop"),
    ],
)
def test_calls_that_the_model_makes_by_itself(
    http: httpx2.Client, script: Script, text: str, content: str | None, calls: Any, reason: str
) -> None:
    """tool_choice auto, which is the default: content, calls and reason, whole and streamed; name first, arguments in pieces."""
    script(*[text] * 3)
    (choice,) = ask(http, messages=HELLO, tools=TOOLS)["choices"]
    message = choice["message"]
    assert (message["content"], functions(message["tool_calls"]), choice["finish_reason"]) == (content, calls, reason)
    assert (message["tool_calls"] is None) == (not calls)
    assert len({call["id"] for call in message["tool_calls"] or []}) == len(calls)
    chunks = stream(http, messages=HELLO, tools=TOOLS, tool_choice="auto", logprobs=True)
    got = gathered(chunks)
    assert (got[0], functions(got[1]), got[2]) == (content or "", calls, reason)
    pieces = [p for chunk in chunks for c in chunk["choices"] for p in c["delta"].get("tool_calls", [])]
    assert len(pieces) > len(calls) * 5 or calls in ([], [("now", "{}")])
    told = [token for chunk in chunks for c in chunk["choices"] for token in (c["logprobs"] or {"content": []})["content"]]
    assert len(told) == len(text.encode()) + 1  # every token is told once, whatever became of its text


def test_only_one_call_where_one_is_wanted(http: httpx2.Client, script: Script) -> None:
    """parallel_tool_calls = false."""
    script(*[CALL + CALL] * 2)
    (choice,) = ask(http, messages=HELLO, tools=TOOLS, parallel_tool_calls=False)["choices"]
    assert functions(choice["message"]["tool_calls"]) == [("weather", ARGUMENTS)]
    assert functions(gathered(stream(http, messages=HELLO, tools=TOOLS, parallel_tool_calls=False))[1]) == [("weather", ARGUMENTS)]


def test_none_and_allowed_tools(http: httpx2.Client, script: Script) -> None:
    """Where no call is allowed, or not of this tool, what looks like one is content."""
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("now")]}}
    script(*[CALL] * 3)
    for choice in ("none", some):
        (answer,) = ask(http, messages=HELLO, tools=TOOLS, tool_choice=choice)["choices"]
        assert (answer["message"]["content"], answer["finish_reason"]) == (CALL, "stop")
    some["allowed_tools"]["tools"] = [named("weather")]  # type: ignore[index]
    assert ask(http, messages=HELLO, tools=TOOLS, tool_choice=some)["choices"][0]["finish_reason"] == "tool_calls"


def test_cut_off_calls_end_with_length(http: httpx2.Client, script: Script) -> None:
    """What there is of the arguments comes all the same."""
    script(*[CALL] * 2)
    (choice,) = ask(http, messages=HELLO, tools=TOOLS, max_tokens=60)["choices"]
    ((name, arguments),) = functions(choice["message"]["tool_calls"])
    assert (name, choice["finish_reason"]) == ("weather", "length") and arguments and ARGUMENTS.startswith(arguments)
    assert functions(gathered(stream(http, messages=HELLO, tools=TOOLS, max_tokens=60))[1]) == [(name, arguments)]


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [("required", True), ("required", False), (named("weather"), True), (named("now"), None)],
    ids=str,
)
def test_calls_that_must_be_made(http: httpx2.Client, choice: Any, parallel: bool | None) -> None:
    """A random model calls: a tool that is there, with arguments that its parameters allow; one where only one may come."""
    asked: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "temperature": 1.2, "max_tokens": 180}
    if parallel is not None:
        asked["parallel_tool_calls"] = parallel
    met = set()
    for seed in range(3):
        (one,) = ask(http, **asked, seed=seed)["choices"]
        if one["finish_reason"] == "length":  # it calls and calls
            assert parallel and choice == "required"
            continue
        calls = functions(one["message"]["tool_calls"])
        assert one["message"]["content"] is None and one["finish_reason"] == "tool_calls"
        assert len(calls) == 1 or (parallel and choice == "required")
        for name, arguments in calls:
            met.add(name)
            assert choice == "required" or name == choice["function"]["name"]
            jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object", "maxProperties": 0})
        content, streamed, reason = gathered(stream(http, **asked, seed=seed))
        assert (content, functions(streamed), reason) == ("", calls, "tool_calls")
    assert met or parallel


FREE: dict[str, Any] = {"messages": HELLO, "tools": STRICT_TOOLS, "temperature": 1.2, "max_tokens": 200}
LATE = {"name": "weather", "arguments": {"city": "Oslo", "days": 1}}


@pytest.mark.parametrize(
    ("start", "content"),
    [
        ('<tool_call>{"name": "weather", "arguments": {', None),
        ('Well.\n<tool_call>\n{"name": "weather", "parameters": {', "Well."),
        (' {"name": "weather", "arguments": {', None),
        ('[{"name": "weather", "arguments": {', None),
        (f'{CALL} and <tool_call>{{"name": "weather", "arguments": {{', "and"),
    ],
)
def test_strict_tools_are_called_rightly_or_not_at_all(http: httpx2.Client, begins: Script, start: str, content: str | None) -> None:
    """Free to call, a random model that begins to call a strict tool gives arguments that its parameters allow, in whatever form."""
    begins(start)
    finished = False
    for seed in range(5):
        if finished:
            break
        (choice,) = ask(http, **FREE, seed=seed)["choices"]
        calls = functions(choice["message"]["tool_calls"])
        name, arguments = calls[start.count("</tool_call>")]
        assert name == "weather" and (content is None or content in (choice["message"]["content"] or ""))
        try:
            given = json.loads(arguments)
        except ValueError:
            assert choice["finish_reason"] == "length" and len(calls) == start.count('"name"'), "it went on after half a call"
        else:
            jsonschema.validate(given, WEATHER)
            finished = True
    assert finished, "no call was finished: nothing was tried"


@pytest.mark.parametrize("parallel", [True, False])
def test_text_is_free_beside_strict_tools(http: httpx2.Client, script: Script, parallel: bool) -> None:
    """What could be written before can be still, but a call that the tool does not allow."""
    for text in ("No need: é 😀 {}.", "a < b <tool", f"I look.\n{CALL}\nDone.", CALL, json.dumps(LATE), ""):
        script(text)
        (choice,) = ask(http, messages=HELLO, tools=STRICT_TOOLS, parallel_tool_calls=parallel)["choices"]
        message = choice["message"]
        assert len(message["tool_calls"] or []) == ("city" in text)
        assert message["content"] == (None if text == CALL or text[:1] == "{" else "I look.\nDone." if "look" in text else text)


def test_an_answer_in_a_format_or_a_call(http: httpx2.Client, begins: Script, script: Script) -> None:
    """response_format beside tools: either. JSON that looks like a call is an answer, if no tag is around it."""
    schema = {"type": "object", "properties": {"name": {"enum": ["weather"]}, "arguments": {"type": "object", "maxProperties": 0}}}
    schema |= {"required": ["name", "arguments"], "additionalProperties": False}
    strict: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(2):
        begins("{")
        (choice,) = ask(http, **FREE, seed=seed, response_format=strict)["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert choice["message"]["tool_calls"] is None
    for form in ({"type": "json_object"}, strict):
        for tools in (TOOLS, STRICT_TOOLS):
            script(CALL, CALL + CALL)
            (choice,) = ask(http, messages=HELLO, tools=tools, response_format=form)["choices"]
            assert functions(choice["message"]["tool_calls"]) == [("weather", ARGUMENTS)] and choice["message"]["content"] is None
            assert len(gathered(stream(http, messages=HELLO, tools=tools, response_format=form))[1]) == 2


def test_no_format_beside_tools_where_calls_have_no_tags(http: httpx2.Client, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model's calls look like answers: 400 that says what to do instead."""
    template = ChatTemplate("{% if tools %}{{ tools }}{% endif %}{{ messages }}", special_tokens={})
    monkeypatch.setattr(engine.prompts.tokenizer, "_templates", {"default": template})
    asked = {"messages": HELLO, "tools": TOOLS, "response_format": {"type": "json_object"}, "max_tokens": 1}
    error = refusal(http.post(CHAT, json=asked))
    assert error["param"] == "response_format" and "tool_choice" in error["message"]
    assert http.post(CHAT, json=asked | {"tool_choice": "none"}).status_code == 200


def test_a_whole_round(client: openai.OpenAI, http: httpx2.Client, script: Script) -> None:
    """The official client's own objects go back: the call and its result stand in the next prompt."""
    script(CALL, "It rains.")
    first = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls and message.tool_calls[0].type == "function"
    assert message.tool_calls[0].id.isalnum() and len(message.tool_calls[0].id) == 9  # as Mistral's templates want it
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    second = client.chat.completions.create(
        model="tiny", messages=[*HELLO, message, result], extra_body={"return_token_ids": True}, tools=[]
    )
    assert second.choices[0].message.content == "It rains."
    ids = second.model_extra["prompt_token_ids"]  # type: ignore[index]
    prompt = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert prompt == (
        f"<user>Hello\n<assistant>{CALL}\n<user><tool_response>\nrain\n</tool_response>\n<assistant>"  # this template knows no tools
    )


def test_the_official_clients_accumulation(client: openai.OpenAI, script: Script) -> None:
    """Its stream helper finds the calls, with their arguments parsed."""
    script("Well. " + CALL)
    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=STRICT_TOOLS) as manager:
        kinds = {event.type for event in manager}
        (choice,) = manager.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls and choice.message.tool_calls[0].function.parsed_arguments == json.loads(ARGUMENTS)


def test_n_answers_have_calls_of_their_own(http: httpx2.Client, script: Script) -> None:
    """Each choice its own."""
    script(CALL)
    body = ask(http, messages=HELLO, tools=TOOLS, n=2, temperature=0)
    assert [functions(choice["message"]["tool_calls"]) for choice in body["choices"]] == [[("weather", ARGUMENTS)]] * 2


def test_the_model_is_told_of_tools(http: httpx2.Client) -> None:
    """In the prompt, unless none may be called."""
    for choice, told in (("auto", True), ("required", True), ("none", False)):
        asked = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 1, "return_token_ids": True}
        body = validity.chat(http.post(CHAT, json=asked).json())
        prompt = http.post("/detokenize", json={"tokens": body["prompt_token_ids"]}).json()["prompt"]
        assert ('"weather"' in prompt) == told


@pytest.mark.parametrize(
    ("fields", "where", "why"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": named("f")}, "tool_choice", "not among the tools"),
        ({"tools": TOOLS, "tool_choice": named("f")}, "tool_choice", "'f'"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "same name"),
        (
            {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
            "response_format",
            "false",
        ),
        ({"tools": STRICT_TOOLS, "use_beam_search": True}, "structured_outputs", "beam search"),
        ({"tools": [tool("f", {"properties": 5}, strict=True)]}, "tools", ""),
        ({"tools": [tool("f", {"type": "array"}, strict=True)]}, "tools", "type object"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs", "exclude"),
        ({"tools": TOOLS, "tool_choice": "required", "use_beam_search": True}, "structured_outputs", "beam search"),
        ({"tools": [tool("f", {"type": "array"})], "tool_choice": "required"}, "tools", "type object"),
        ({"tools": [tool("f", {"properties": 5})], "tool_choice": "required"}, "tools", ""),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
    ],
)
def test_refusals(http: httpx2.Client, fields: dict[str, Any], where: str, why: str) -> None:
    """Named and explained."""
    error = refusal(http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **fields}))
    assert error["param"] == where and why in error["message"], error


def test_deep_parameters_kill_nothing(http: httpx2.Client, engine: AsyncLLM) -> None:
    """As deep as a body may be: an answer or a refusal."""
    schema: Any = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for choice in ("auto", "required"):
        answer = http.post(CHAT, json={"messages": HELLO, "tools": tools, "tool_choice": choice, "max_tokens": 1})
        assert answer.status_code in (200, 400)
    assert engine.engine_loop.alive

"""Templates that know no tools are told of them in plain messages; those that do know them see what the caller sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.core.text.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
KNOWING = "{{ tools | tojson }}" + PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m['tool_calls'] | length }}")
USER = {"role": "user", "content": "Where?"}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "é <&>", "parameters": {"type": "object"}}}]
CALLS = {
    "role": "assistant",
    "content": "Wait.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get", "arguments": {"q": "é"}}},
        {"id": "2", "type": "function", "function": {"name": "get", "arguments": ""}},
    ],
}
RESULTS = [{"role": "tool", "tool_call_id": "1", "content": "here"}, {"role": "tool", "tool_call_id": "2", "content": "there"}]


def render(messages: list[dict[str, Any]], tools: list[Any] | None = None, template: str = PLAIN) -> str:
    return ChatTemplate(template, special_tokens={}).render(messages, add_generation_prompt=False, tools=tools)


def test_tools_stand_in_a_system_message() -> None:
    """Each on a line of JSON, with how to call it."""
    text = render([USER], TOOLS)
    assert text.startswith("<system># Tools\n") and text.endswith("</tool_call></><user>Where?</>")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text.split("\n")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_follow_what_the_system_message_says(role: str) -> None:
    """It stays the only one."""
    text = render([{"role": role, "content": "Be brief."}, USER], TOOLS)
    assert text.startswith(f"<{role}>Be brief.\n\n# Tools") and text.count("<system>") + text.count("<developer>") == 1


def test_calls_and_results_stay_in_the_conversation() -> None:
    """Calls in the assistant's words, the results of one turn in one message."""
    assert render([USER, CALLS, *RESULTS]) == (
        "<user>Where?</><assistant>Wait.\n"
        '<tool_call>\n{"name": "get", "arguments": {"q": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call></>'
        "<user><tool_response>\nhere\n</tool_response>\n<tool_response>\nthere\n</tool_response></>"
    )


def test_what_the_user_says_is_not_joined_to_a_result() -> None:
    """Only results are."""
    assert render([RESULTS[0], USER, RESULTS[1]]).count("<user>") == 3


def test_templates_that_know_tools_are_left_alone() -> None:
    """They see tools, calls and results as sent."""
    text = render([USER, CALLS, RESULTS[0]], TOOLS, KNOWING)
    assert text == json.dumps(TOOLS, ensure_ascii=False) + "<user>Where?0</><assistant>Wait.2</><tool>here0</>"


def test_without_tools_nothing_changes() -> None:
    """Not for an empty list of them either."""
    assert render([USER]) == render([USER], []) == "<user>Where?</>"


@pytest.mark.parametrize("call", [5, {}, {"function": "get"}])
def test_a_call_without_a_function_is_refused(call: Any) -> None:
    """It cannot be told."""
    with pytest.raises(RequestError, match="tool_calls"):
        render([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_who_is_asked_for_tags() -> None:
    """Models whose template knows no tools, as we tell them, and those whose template says so itself."""
    for template, tags in ((PLAIN, True), (KNOWING, False), (KNOWING + "<tool_call>", True)):
        assert ChatTemplate(template, special_tokens={}).tags_calls == tags

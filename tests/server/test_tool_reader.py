"""Calls found in what models write, whatever the pieces; what is no call is content, to the letter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from octavo.server.openai.tool_reader import ToolPiece, ToolReader

NAMES = ("get", "set")
Calls = list[tuple[str, str]]


def read(pieces: list[str], *, parallel: bool = True) -> tuple[str, Calls, list[ToolPiece]]:
    """Content, calls as (name, arguments), and what came when."""
    reader = ToolReader(NAMES, parallel=parallel)
    *most, final = pieces or [""]
    got = [*(reader.push(piece) for piece in most), reader.push(final, last=True)]
    content, calls, ids = "", dict[int, tuple[str, str]](), set[str]()
    for piece in got:
        content += piece.content
        for call in piece.calls:
            if call.index not in calls:
                assert call.name and call.id and call.index == len(calls) and call.id not in ids
                ids.add(call.id)
                calls[call.index] = (call.name, call.arguments)
            else:
                assert call.name is None and call.id is None
                calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert reader.num_calls == len(calls)
    return content, list(calls.values()), got


GET = '{"name": "get", "arguments": {"a": "}\\"{]"}}'
SET = '{"name": "set", "arguments": {}}'
TAGGED = "<tool_call>\n%s\n</tool_call>"
ONE: Calls = [("get", '{"a": "}\\"{]"}')]
TWO: Calls = [*ONE, ("set", "{}")]

# what a model writes, the content in it, the calls in it
CASES: dict[str, tuple[str, str, Calls]] = {
    "nothing": ("", "", []),
    "text": ("Hello, <b>world</b> {not json} ", "Hello, <b>world</b> {not json} ", []),
    "white space": (" \n", " \n", []),
    "Hermes": (TAGGED % GET, "", ONE),
    "Hermes, two": (TAGGED % GET + "\n" + TAGGED % SET, "", TWO),
    "Hermes after text": ("I look.\n\n" + TAGGED % GET, "I look.", ONE),
    "Hermes before text": (TAGGED % GET + "\nDone. ", "\nDone.", ONE),
    "Hermes, never closed": ("<tool_call>" + GET, "", ONE),
    "Hermes, cut in the closing tag": ("<tool_call>" + GET + "</tool_c", "", ONE),
    "Hermes, cut in the arguments": ('<tool_call>{"name": "get", "arguments": {"a": [1, "x', "", [("get", '{"a": [1, "x')]),
    "Hermes, cut before them": ('<tool_call>{"name": "get", "argu', '<tool_call>{"name": "get", "argu', []),
    "Hermes, cut in the opening tag": ("a <tool_c", "a <tool_c", []),
    "SmolLM's list": (f"<tool_call>[{GET}, {SET}]</tool_call>", "", TWO),
    "Llama 3.1": ('{"name": "get", "parameters": {"q": 1}}', "", [("get", '{"q": 1}')]),
    "Llama 3.1 with type": ('{"type": "function", "name": "get", "parameters": {"q": 1}}', "", [("get", '{"q": 1}')]),
    "Llama, two": (GET + "; " + SET, "", TWO),
    "Llama, two lines": (" " + GET + "\n" + SET + "\n", "", TWO),
    "Mistral's list": (f"[{GET}, {SET}]", "", TWO),
    "OpenAI's own form": ('[{"id": "x", "type": "function", "function": {"name": "get", "arguments": "{}"}}]', "", [("get", "{}")]),
    "arguments first": ('{"arguments": {"q": 1}, "name": "get"}', "", [("get", '{"q": 1}')]),
    "arguments as text": ('{"name": "get", "arguments": "{\\"q\\": 1}"}', "", [("get", '{"q": 1}')]),
    "tagged without arguments": ('<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
    "bare without arguments": ('{"name": "get"}', '{"name": "get"}', []),
    "unknown name": ('{"name": "put", "arguments": {}}', '{"name": "put", "arguments": {}}', []),
    "unknown name, tagged": (TAGGED % '{"name": "put", "arguments": {}}', TAGGED % '{"name": "put", "arguments": {}}', []),
    "name is no text": ('{"name": ["get"], "arguments": {}}', '{"name": ["get"], "arguments": {}}', []),
    "arguments are no object": ('{"name": "get", "arguments": [1]}', '{"name": "get", "arguments": [1]}', []),
    "another object": ('{"city": "Paris", "n": {"a": [1]}} ', '{"city": "Paris", "n": {"a": [1]}} ', []),
    "another list": ("[1, 2]", "[1, 2]", []),
    "empty list": ("[]", "[]", []),
    "empty object": ("{} x", "{} x", []),
    "a key twice": ('{"id": 1, "id": 2, "name": "get"}', '{"id": 1, "id": 2, "name": "get"}', []),
    "a list that begins with a call": (f'[{GET}, {{"x": 1}}]', ', {"x": 1}]', ONE),
    "text after bare calls": (GET + " and so", " and so", ONE),
    "a tag without JSON": ("<tool_call>what</tool_call>", "<tool_call>what</tool_call>", []),
    "a tag twice": ("<tool_call><tool_call>" + GET + "</tool_call>", "<tool_call>", ONE),
    "a call inside another object": ('{"x": "<tool_call>' + SET + '</tool_call>"}', '{"x": ""}', [TWO[1]]),
    "no object after a key": ('{"name" "get"}', '{"name" "get"}', []),
    "broken after the arguments": (f"<tool_call>{GET[:-1]}!</tool_call>", "!</tool_call>", ONE),
    "escapes in the name": ('{"name": "g\\u0065t", "arguments": {}}', "", [("get", "{}")]),
    "a broken name": ('{"name": "g\\xt", "arguments": {}}', '{"name": "g\\xt", "arguments": {}}', []),
    "scalars": ('{"id": 12 , "type":null,"name":"get","arguments":{}}', "", [("get", "{}")]),
}


JSON = st.recursive(st.none() | st.booleans() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4)


@pytest.mark.parametrize("name", CASES)
def test_whole(name: str) -> None:
    """What is there is found, and nothing else is lost."""
    text, content, calls = CASES[name]
    assert read([text])[:2] == (content, calls)


@pytest.mark.parametrize("name", CASES)
def test_character_by_character(name: str) -> None:
    """The same."""
    text, content, calls = CASES[name]
    assert read(list(text))[:2] == (content, calls)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([*CASES.values()]), max_size=3).map(lambda cases: "".join(case[0] for case in cases)), st.data())
def test_any_text_in_any_pieces(text: str, data: st.DataObject) -> None:
    """Pieces add up to what the whole gives."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces)[:2] == read([text])[:2]


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet='{}[]",:\\ <>/tolca_name1\n', max_size=60))
def test_text_without_names_is_content_to_the_letter(text: str) -> None:
    """However much it looks like JSON."""
    assert read(list(text))[:2] == (text, [])


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.text(), JSON))
def test_arguments_come_as_they_were_written(arguments: dict[str, Any]) -> None:
    """Any JSON object, compared with Python's own reader."""
    for text in (json.dumps(arguments), json.dumps(arguments, indent=1, ensure_ascii=False)):
        content, [(name, got)], _ = read(list(TAGGED % f'{{"name": "get", "arguments": {text}}}'))
        assert (content, name, got) == ("", "get", text)


def test_only_the_first_where_parallel_calls_are_not_wanted() -> None:
    """The others leave no trace."""
    for text in (TAGGED % GET + TAGGED % SET, f"[{GET}, {SET}]", GET + SET):
        assert read(list(text), parallel=False)[:2] == ("", ONE)


def test_nothing_is_held_longer_than_it_may_become_a_call() -> None:
    """Text goes out at once, a name when its arguments begin, arguments as they come, another object at its first key."""
    *_, pieces = read(["Hel", "lo <", "b>", " <tool", ""])
    assert [piece.content for piece in pieces] == ["Hel", "lo", " <b>", "", " <tool"]
    *_, pieces = read(['<tool_call>{"name": "get"', ', "arguments": {', '"a": ', "1}", "}</tool_call>", ""])
    assert [[(c.name, c.arguments) for c in piece.calls] for piece in pieces] == [
        [],
        [("get", "{")],
        [(None, '"a": ')],
        [(None, "1}")],
        [],
        [],
    ]
    *_, pieces = read(['{"ci', 'ty"', ': "Par', 'is"}', ""])
    assert [piece.content for piece in pieces] == ["", '{"city"', ': "Par', 'is"}', ""]

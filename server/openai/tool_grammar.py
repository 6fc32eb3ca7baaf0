"""What an output must follow so that its calls are right: grammars of calls that must be made, and of calls that may be.

A call is told from other text as `octavo.server.openai.tool_reader` tells it. Must not know: requests, how a grammar is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.errors import ApiError
from octavo.server.openai.chat_schema import Tool
from octavo.server.openai.tool_reader import ARGUMENTS, CLOSING, OPENING

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SPACE = r"SPACE: /[ \t\r\n]+/"
# Free text around calls. A rule that is `lazy` ends where its expression first matches, so no tag is passed over; text that begins as
# JSON does is a call, as it is for the reader.
AMONG_TEXT = rf"""
start: CONTENT? | to_first_tag tagged {{more}} REST? | SPACE? ( call | list ) SPACE?
list: "[" SPACE? call {{others}} SPACE? "]"
tagged: SPACE? call SPACE? "{CLOSING}"
to_first_tag[lazy]: /[ \t\r\n]*([^ \t\r\n{{{{\[](.|\n)*)?{OPENING}/
to_tag[lazy]: /(.|\n)*{OPENING}/
CONTENT: /[ \t\r\n]*[^ \t\r\n{{{{\[](.|\n)*/ & ~/(.|\n)*{OPENING}(.|\n)*/
REST: /(.|\n)+/ & ~/(.|\n)*{OPENING}(.|\n)*/
{SPACE}
call: %json {{calls}}
"""
# Calls, each in tags, or an answer in JSON, never both.
OR_ANSWER = f"""
start: answer | SPACE? tagged {{more}} SPACE?
tagged: "{OPENING}" SPACE? call SPACE? "{CLOSING}"
{SPACE}
call: %json {{calls}}
answer: %json {{answer}}
"""


def calls_that_must_be(tools: Sequence[Tool], *, parallel: bool) -> StructuredOutputsParams:
    """A JSON list of one or more calls, each with a tool's name and what its parameters allow, in this order. Raises ApiError."""
    call = _call_schema(tools, [ARGUMENTS[0]], [_parameters(tool) for tool in tools])
    whole = {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
    return StructuredOutputsParams(json=whole if parallel else {**whole, "maxItems": 1})  # type: ignore[arg-type]


def calls_that_may_be(tools: Sequence[Tool], *, parallel: bool, answer: StructuredOutputsParams | None) -> StructuredOutputsParams:
    """Text with calls in it or, where an `answer` is wanted, that or calls. A call of a strict tool has what its parameters allow, of
    another any arguments. Raises ApiError.
    """
    parameters = [_parameters(tool) if tool.function.strict else {"type": "object"} for tool in tools]
    calls = json.dumps(_call_schema(tools, ARGUMENTS, parameters))
    if answer is None:
        more, others = ("(to_tag tagged)*", '(SPACE? "," SPACE? call)*') if parallel else ("", "")
        return StructuredOutputsParams(grammar=AMONG_TEXT.format(more=more, others=others, calls=calls))
    more = "(SPACE? tagged)*" if parallel else ""
    return StructuredOutputsParams(grammar=OR_ANSWER.format(more=more, calls=calls, answer=_answer_schema(answer)))


def _answer_schema(answer: StructuredOutputsParams) -> str:
    schema = {"type": "object"} if answer.json is None else json.loads(answer.json)
    if schema is False:
        raise ApiError(400, "response_format: the schema is false, which allows nothing", param="response_format")
    return json.dumps({} if schema is True else schema)


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters
    if schema.get("type", "object") != "object":
        raise ApiError(400, f"the parameters of tool {tool.function.name!r} must be of type object", param="tools")
    return schema


def _call_schema(tools: Sequence[Tool], keys: Sequence[str], parameters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One call, its arguments under any of the keys."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, key: {"$ref": f"#/$defs/{number}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
        for key in keys
    ]
    return {
        "anyOf": calls,
        "$defs": {str(number): {"type": "object", **_moved(one, f"#/$defs/{number}")} for number, one in enumerate(parameters)},
    }


def _moved(schema: Any, to: str) -> Any:
    """The schema as a part of another one: references to its own parts are prefixed."""
    if isinstance(schema, list):
        return [_moved(one, to) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{to}{value[1:]}" if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, to)
        for key, value in schema.items()
    }

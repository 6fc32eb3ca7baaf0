"""What `tools`, `tool_choice` and `parallel_tool_calls` mean: which tools the template shows, what the output must be, how it is read.

A call that must be made is forced by a grammar: the whole output is then a JSON list of calls. One that may be made is free, and found
in what the model writes. Must not know: how an answer is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.errors import ApiError
from octavo.server.openai.chat_schema import AllowedTools, ChatCompletionRequest, NamedTool, Tool
from octavo.server.openai.tool_reader import ToolReader

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Of one request. `shown`: as templates want them. `forced`: what the output must follow, if a call must be made."""

    shown: list[dict[str, Any]]
    names: frozenset[str]
    parallel: bool
    forced: StructuredOutputsParams | None

    def reader(self) -> ToolReader:
        """For one output."""
        return ToolReader(self.names, parallel=self.parallel)


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """None: no call may be made. Raises ApiError."""
    tools, choice = body.tools or [], body.tool_choice
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise ApiError(400, "two tools have the same name", param="tools")
    if isinstance(choice, AllowedTools):
        by_name = {one.function.name: _known(by_name, one.function.name) for one in choice.allowed_tools.tools}
        choice = choice.allowed_tools.mode
    if isinstance(choice, NamedTool):
        chosen = [_known(by_name, choice.function.name)]
    else:
        chosen = list(by_name.values())
        if choice == "required" and not chosen:
            raise ApiError(400, 'tool_choice = "required" needs tools', param="tool_choice")
    if choice == "none" or not chosen:
        return None
    must = choice == "required" or isinstance(choice, NamedTool)
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    if not must and (body.structured_outputs or (body.response_format and body.response_format.type != "text")):
        field = "structured_outputs" if body.structured_outputs else "response_format"
        raise ApiError(400, f'{field} would keep the model from calling a tool: set tool_choice to "none" or "required"', param=field)
    if must and body.structured_outputs:
        raise ApiError(400, "structured_outputs and a tool that must be called exclude each other", param="structured_outputs")
    return ToolUse(
        [tool.model_dump(exclude_none=True) for tool in by_name.values()],
        frozenset(tool.function.name for tool in chosen),
        parallel,
        StructuredOutputsParams(json=_calls_schema(chosen, parallel=parallel)) if must else None,  # type: ignore[arg-type]
    )


def _known(by_name: dict[str, Tool], name: str) -> Tool:
    if name not in by_name:
        raise ApiError(400, f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")
    return by_name[name]


def _calls_schema(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """A list of one or more calls, each with a tool's name and what its parameters allow, in this order."""
    parameters = [NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters for tool in tools]
    for tool, schema in zip(tools, parameters, strict=True):
        if schema.get("type", "object") != "object":
            raise ApiError(400, f"the parameters of tool {tool.function.name!r} must be of type object", param="tools")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    whole = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": {str(number): {"type": "object", **_moved(one, f"#/$defs/{number}")} for number, one in enumerate(parameters)},
    }
    return whole if parallel else {**whole, "maxItems": 1}


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

"""What `tools`, `tool_choice` and `parallel_tool_calls` mean: which tools the template shows, what the output must be, how it is read.

A call that must be made is forced by a grammar: the whole output is then a JSON list of calls. One that may be made is found in what the
model writes, which follows a grammar where a tool is strict or an answer has a format. Must not know: how an answer is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.errors import ApiError
from octavo.server.openai.chat_schema import AllowedTools, ChatCompletionRequest, NamedTool, Tool
from octavo.server.openai.params import structure
from octavo.server.openai.tool_grammar import calls_that_may_be, calls_that_must_be
from octavo.server.openai.tool_reader import ToolReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Of one request. `shown`: as templates want them. `output`: what it must follow, if anything, and `field`: who wants that."""

    shown: list[dict[str, Any]]
    names: frozenset[str]
    parallel: bool
    only_tagged: bool
    output: StructuredOutputsParams | None
    field: str

    def reader(self) -> ToolReader:
        """For one output."""
        return ToolReader(self.names, parallel=self.parallel, only_tagged=self.only_tagged)


def tool_use(body: ChatCompletionRequest, *, tags_calls: bool) -> ToolUse | None:
    """None: no call may be made. `tags_calls`: the model is taught to write calls in tags. Raises ApiError."""
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
    answer = structure(body, body.response_format)
    if body.structured_outputs:
        why = "and a tool that must be called exclude each other" if must else 'keep the model from calling: set tool_choice to "none"'
        raise ApiError(400, f"structured_outputs {why}", param="structured_outputs")
    forced = (calls_that_must_be(chosen, parallel=parallel), "tools") if must else None
    output, field = forced or _free(chosen, parallel=parallel, answer=answer, tags_calls=tags_calls)
    return ToolUse(
        shown=[tool.model_dump(exclude_none=True) for tool in by_name.values()],
        names=frozenset(tool.function.name for tool in chosen),
        parallel=parallel,
        only_tagged=answer is not None and not must,
        output=output,
        field=field,
    )


def _free(
    tools: Sequence[Tool], *, parallel: bool, answer: StructuredOutputsParams | None, tags_calls: bool
) -> tuple[StructuredOutputsParams | None, str]:
    """Of calls that may be made: what the output must follow, and the field that wants it."""
    if answer is not None and not tags_calls:
        message = "this model writes calls as JSON, which cannot be told from such an answer"
        raise ApiError(400, f'response_format: {message}: set tool_choice to "none" or "required"', param="response_format")
    strict = any(tool.function.strict for tool in tools)
    if answer is None and not strict:
        return None, ""
    return calls_that_may_be(tools, parallel=parallel, answer=answer), "tools" if strict else "response_format"


def _known(by_name: dict[str, Tool], name: str) -> Tool:
    if name not in by_name:
        raise ApiError(400, f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")
    return by_name[name]

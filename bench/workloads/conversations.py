"""Conversations: each turn's prompt is all that was said before it, and its own tokens.

Must not know: engines, arrivals.
"""

from __future__ import annotations

from pydantic import Field

from octavo.bench.drawing import Draw, WorkloadOptions, lognormal
from octavo.bench.work import Item


class ChatOptions(WorkloadOptions):
    """Of chats with people."""

    turns: int = Field(4, ge=1, description="questions in a conversation")
    system_len: int = Field(64, ge=0, description="tokens of a system prompt that all conversations have in common")
    input_len: int = Field(40, ge=1, description="mean tokens of a question (lognormal)")
    output_len: int = Field(120, ge=1, description="mean tokens of an answer (lognormal)")
    cv: float = Field(0.7, ge=0, description="coefficient of variation of both")
    pause: float = Field(2.0, ge=0, description="mean seconds in which the answer is read and the next question written (exponential)")


def chats(draw: Draw, options: ChatOptions) -> list[Item]:
    """Conversations of several turns with pauses between them."""
    lengths, tokens, pauses = draw.stream("lengths"), draw.stream("tokens"), draw.stream("pauses")
    system = draw.tokens(draw.stream("system"), options.system_len)
    items: list[Item] = []
    for number in range(draw.count):
        turn = number % options.turns
        items.append(
            Item(
                prompt=(() if turn else system) + draw.tokens(tokens, lognormal(lengths, options.input_len, options.cv)),
                output_len=lognormal(lengths, options.output_len, options.cv),
                at=0.0 if turn else float(number),
                class_name="chat",
                after=number - 1 if turn else None,
                pause=pauses.expovariate(1 / options.pause) if turn and options.pause else 0.0,
            )
        )
    return items


class AgentOptions(WorkloadOptions):
    """Of an agent that calls tools."""

    steps: int = Field(10, ge=1, description="model calls in one task")
    system_len: int = Field(512, ge=0, description="tokens of instructions and tool descriptions that all tasks have in common")
    task_len: int = Field(64, ge=1, description="mean tokens of a task (lognormal)")
    result_len: int = Field(160, ge=1, description="mean tokens of a tool's result, which each later call adds (lognormal)")
    output_len: int = Field(48, ge=1, description="mean tokens of a call (lognormal)")
    cv: float = Field(0.7, ge=0, description="coefficient of variation of all three")
    tool_s: float = Field(0.2, ge=0, description="mean seconds that a tool takes (exponential)")


def agent(draw: Draw, options: AgentOptions) -> list[Item]:
    """Tasks whose conversation grows by a call and a tool's result at each step."""
    lengths, tokens, pauses = draw.stream("lengths"), draw.stream("tokens"), draw.stream("pauses")
    system = draw.tokens(draw.stream("system"), options.system_len)
    items: list[Item] = []
    for number in range(draw.count):
        step = number % options.steps
        new = lognormal(lengths, options.result_len if step else options.task_len, options.cv)
        items.append(
            Item(
                prompt=(() if step else system) + draw.tokens(tokens, new),
                output_len=lognormal(lengths, options.output_len, options.cv),
                at=0.0 if step else float(number),
                class_name="agent",
                after=number - 1 if step else None,
                pause=pauses.expovariate(1 / options.tool_s) if step and options.tool_s else 0.0,
            )
        )
    return items

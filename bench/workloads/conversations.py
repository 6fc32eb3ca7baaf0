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


class AgentOptions(WorkloadOptions):
    """Of an agent that calls tools."""

    steps: int = Field(10, ge=1, description="model calls in one task")
    system_len: int = Field(512, ge=0, description="tokens of instructions and tool descriptions that all tasks have in common")
    task_len: int = Field(64, ge=1, description="mean tokens of a task (lognormal)")
    result_len: int = Field(160, ge=1, description="mean tokens of a tool's result, which each later call adds (lognormal)")
    output_len: int = Field(48, ge=1, description="mean tokens of a call (lognormal)")
    cv: float = Field(0.7, ge=0, description="coefficient of variation of all three")
    tool_s: float = Field(0.2, ge=0, description="mean seconds that a tool takes (exponential)")


def chats(draw: Draw, options: ChatOptions) -> list[Item]:
    """Conversations of several turns with pauses between them."""
    return _turns(
        draw,
        "chat",
        count=options.turns,
        system_len=options.system_len,
        first_len=options.input_len,
        next_len=options.input_len,
        output_len=options.output_len,
        cv=options.cv,
        pause=options.pause,
    )


def agent(draw: Draw, options: AgentOptions) -> list[Item]:
    """Tasks whose conversation grows by a call and a tool's result at each step."""
    return _turns(
        draw,
        "agent",
        count=options.steps,
        system_len=options.system_len,
        first_len=options.task_len,
        next_len=options.result_len,
        output_len=options.output_len,
        cv=options.cv,
        pause=options.tool_s,
    )


def _turns(
    draw: Draw, class_name: str, *, count: int, system_len: int, first_len: int, next_len: int, output_len: int, cv: float, pause: float
) -> list[Item]:
    """Conversations of `count` requests; those after the first bring `next_len` tokens and come after a pause."""
    lengths, tokens, pauses = draw.stream("lengths"), draw.stream("tokens"), draw.stream("pauses")
    system = draw.tokens(draw.stream("system"), system_len)
    items: list[Item] = []
    for number in range(draw.count):
        turn = number % count
        items.append(
            Item(
                prompt=(() if turn else system) + draw.tokens(tokens, lognormal(lengths, next_len if turn else first_len, cv)),
                output_len=lognormal(lengths, output_len, cv),
                at=0.0 if turn else float(number),
                class_name=class_name,
                after=number - 1 if turn else None,
                pause=pauses.expovariate(1 / pause) if turn and pause else 0.0,
            )
        )
    return items

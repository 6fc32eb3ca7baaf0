"""Requests that somebody sent once: a trace, or ShareGPT's conversations.

Must not know: engines.
"""

from __future__ import annotations

from pydantic import Field

from octavo.bench.drawing import Draw, WorkloadOptions
from octavo.bench.request_logs import read_conversations
from octavo.bench.traces import load_trace, replay
from octavo.bench.work import Item
from octavo.core.errors import RequestError

MOST_INPUT, MOST_TOTAL, LEAST = 1024, 2048, 4  # tokens, as vLLM's benchmark prunes the data set


class TraceOptions(WorkloadOptions):
    """Which trace, and how fast."""

    path: str = Field("", description="a trace of `octavo trace anonymise`, or a log that it reads")
    time_scale: float = Field(1.0, gt=0, description="its gaps are multiplied by this")


def recorded_trace(draw: Draw, options: TraceOptions) -> list[Item]:
    """Lengths and times of a request log, with random tokens. At most as many requests as it has."""
    return replay(draw, load_trace(_given(options.path, "trace"), encode=draw.encode), time_scale=options.time_scale)


class ShareGptOptions(WorkloadOptions):
    """Which file."""

    path: str = Field("", description="ShareGPT's JSON file")
    output_len: int | None = Field(None, ge=1, description="output tokens; unset: those of the recorded answers")


def sharegpt(draw: Draw, options: ShareGptOptions) -> list[Item]:
    """First questions of ShareGPT's conversations as the model's tokens, as long as their answers; very short and long ones left out.

    At most as many as the file has. Raises RequestError without a tokenizer.
    """
    path = _given(options.path, "sharegpt")
    if draw.encode is None:
        raise RequestError("ShareGPT's texts need a tokenizer: name a model that has one, with --model or --tokenizer", field="path")
    conversations = [conversation[0] for conversation in read_conversations(path) if conversation]
    draw.stream("order").shuffle(conversations)
    items: list[Item] = []
    for question, answer in conversations:
        if len(items) == draw.count:
            break
        prompt = tuple(draw.encode(question))
        output = options.output_len or len(draw.encode(answer))
        if len(prompt) < LEAST or (output < LEAST and options.output_len is None):
            continue
        if len(prompt) <= MOST_INPUT and len(prompt) + output <= MOST_TOTAL:
            items.append(Item(prompt=prompt, output_len=output, at=float(len(items))))
    if not items:
        raise RequestError(f"{path} has no conversation of {LEAST} to {MOST_INPUT} prompt tokens", field="path")
    return items


def _given(path: str, name: str) -> str:
    if not path:
        raise RequestError(f"the workload {name!r} reads a file: name it with --dataset-path", field="path")
    return path

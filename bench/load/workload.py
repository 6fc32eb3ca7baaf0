"""What is asked: requests of lengths drawn from a seed, so that a run can be repeated, and compared with another one.

Must not know: sockets, how answers are read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    body: dict[str, Any]
    path: str = "/v1/completions"
    at: float = 0.0  # seconds after the start at which it is due; all 0: as soon as a client is free
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The body as it is sent."""
        return json.dumps(self.body, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Shortest and longest, in tokens; each length between them is as likely as another."""

    prompt: tuple[int, int]
    output: tuple[int, int]


def token_prompts(*, seed: int, count: int, lengths: Lengths, vocab_size: int) -> Iterator[tuple[list[int], int]]:
    """Prompts of random token ids (the first 256 are left out: special ones are often there), each with its number of output tokens."""
    rng = random.Random(seed)
    lowest = min(256, vocab_size // 2)
    for _ in range(count):
        prompt = [rng.randrange(lowest, vocab_size) for _ in range(rng.randint(*lengths.prompt))]
        yield prompt, rng.randint(*lengths.output)


def completion(prompt: list[int] | str, max_tokens: int, *, model: str, stream: bool, **fields: Any) -> Ask:
    """A greedy request that runs to its `max_tokens`."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return Ask(body)

"""Log probabilities of tokens, of the model's own distribution: before penalties, biases, temperature and filters.

`TokenLogprobs` is what a step brings, `Logprob` what a user reads. Must not know: torch, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


class TokenLogprobs(NamedTuple):
    """Of one token that was sampled, or stands in a prompt."""

    token_id: int
    logprob: float
    rank: int  # 1: no other token is likelier
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first, as many as were asked for


@dataclass(frozen=True, slots=True)
class Logprob:
    """As in vLLM: of a token in its place, among all that could stand there."""

    logprob: float
    rank: int
    decoded_token: str | None  # None: the engine has no tokenizer


def readable(entry: TokenLogprobs, decode: Callable[[int], str] | None) -> dict[int, Logprob]:
    """By token id: the token itself, then the likeliest ones. Always finite."""
    ranked = [(entry.token_id, entry.logprob, entry.rank), *((token, value, rank) for rank, (token, value) in enumerate(entry.top, 1))]
    found: dict[int, Logprob] = {}
    for token, value, rank in ranked:
        if token not in found:
            found[token] = Logprob(max(value, LEAST), rank, decode(token) if decode is not None else None)
    return found

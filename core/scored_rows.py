"""Which tokens of a step are scored, worked out on the host: draws whose log probabilities are asked for, and tokens of prompts.

Must not know: torch, logits, how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from octavo.core.arrays import Ints
from octavo.core.plan import Chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRows:
    """M tokens, those of a chunk next to each other."""

    counts: dict[int, int]  # by the index of the chunk, in order: how many of its tokens
    num_top: Ints  # [M] likeliest tokens that are wanted beside each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredDraws(ScoredRows):
    """The same of draws."""

    rows: Ints  # [M] rows of logits that they were drawn from; several draws may be from one
    draws: Ints  # [M] places among all draws of the step


def scored_draws(chunks: Seq[Chunk], draws: Seq[int]) -> ScoredDraws | None:
    """`draws` [chunks] are drawn in this step for each chunk. None: nobody asks."""
    counts, rows, places, num_top = dict[int, int](), list[int](), list[int](), list[int]()
    row = place = 0
    for index, (chunk, count) in enumerate(zip(chunks, draws, strict=True)):
        num_rows = chunk.stop - chunk.sampled_from
        wanted = chunk.sequence.request.params.num_logprobs
        if wanted is not None and count:
            counts[index] = count
            rows += range(row, row + count) if num_rows == count else [row] * count
            places += range(place, place + count)
            num_top += [wanted] * count
        row += num_rows
        place += count
    if not counts:
        return None
    return ScoredDraws(counts=counts, num_top=_ints(num_top), rows=_ints(rows), draws=_ints(places))


def scored_prompts(chunks: Seq[Chunk]) -> ScoredRows:
    """Of each chunk the positions from `logits_from` to where sampling begins: their logits score the prompt's next token."""
    counts, num_top = dict[int, int](), list[int]()
    for index, chunk in enumerate(chunks):
        count = chunk.sampled_from - chunk.logits_from
        if count:
            counts[index] = count
            num_top += [chunk.sequence.request.params.prompt_logprobs or 0] * count
    return ScoredRows(counts=counts, num_top=_ints(num_top))


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)

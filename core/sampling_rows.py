"""What the sampler is told of each row of logits, as arrays: built once a step.

What changes logits is kept sparse, as (row, token id, value) entries: a row that asks for nothing costs nothing.
Symbols: R rows of logits, N draws in all, M entries. Must not know: torch, plans, logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo.core.arrays import Float32s, Floats, Ints
from octavo.core.random_numbers import uniforms
from octavo.core.sampling_settings import Numbers, Processor, RowSettings
from octavo.core.token_counts import TokenCounts

if TYPE_CHECKING:
    from octavo.core.grammar.compiler import Matcher


class RowRequest(NamedTuple):
    """One row of logits: how to draw from it.

    `draws` tokens are drawn, with sample indices from `sample_index` on (more than one where a request's samples part after their
    common prompt). A row of beams draws none and asks for its `candidates` most likely tokens instead.
    """

    settings: RowSettings
    sample_index: int
    position: int  # of the token to be drawn
    num_output: int  # tokens that its output holds already
    draws: int = 1
    candidates: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()  # only where settings.special: all tokens before the one to be drawn
    counts: TokenCounts | None = None  # of `output`, where settings.penalised
    grammar: Matcher | None = None  # what its output must follow, as far as that has come


class Entries(NamedTuple):
    """Row and token id of M logits."""

    rows: Ints
    ids: Ints

    def __len__(self) -> int:
        """M, not the number of fields."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Added to logits."""

    entries: Entries
    added: Float32s  # [M]


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """A logit is divided by `repetition` if it is positive, else multiplied by it; then `subtracted` is."""

    entries: Entries
    repetition: Float32s  # [M]
    subtracted: Float32s  # [M]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A row whose logits go through users' functions."""

    row: int
    processors: tuple[Processor, ...]
    prompt: Sequence[int]
    output: Sequence[int]


_NO_ENTRIES = Entries(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """The same for all R rows of a step, N draws in all. What is off has its neutral value."""

    temperature: Floats  # [R], 0: greedy
    top_k: Floats  # [R], 0: off
    top_p: Floats  # [R], 1: off
    min_p: Floats  # [R], 0: off
    draws: Ints  # [R]
    uniforms: Floats  # [N], those of a row next to each other
    candidates: Ints  # [R], 0: not a row of beams
    allowed: Entries = _NO_ENTRIES  # in their rows, nothing else may be drawn
    banned: Entries = _NO_ENTRIES  # may not be drawn
    biases: Biases | None = None
    calls: tuple[Call, ...] = ()
    penalties: Penalties | None = None

    @classmethod
    def build(cls, rows: Sequence[RowRequest]) -> SamplingRows:
        """From one record for each row of logits, in their order."""
        numbers = np.array([row.settings.numbers for row in rows], dtype=np.float64).reshape(-1, len(Numbers._fields))
        draws = np.array([row.draws for row in rows], dtype=np.int64)
        temperature, top_k, top_p, min_p = numbers[:, :4].T.copy()
        special = [(index, row) for index, row in enumerate(rows) if row.settings.special]
        return cls(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            draws=draws,
            uniforms=_uniforms(rows, draws) if temperature.any() else np.zeros(int(draws.sum())),
            candidates=np.array([row.candidates for row in rows], dtype=np.int64),
            allowed=_entries([(index, row.settings.allowed) for index, row in special]),
            banned=_entries([(index, ids) for index, row in special for ids in _banned(row)]),
            biases=_biases(special),
            calls=tuple(Call(index, row.settings.processors, row.prompt, row.output) for index, row in special if row.settings.processors),
            penalties=_penalties([(index, row) for index, row in special if row.settings.penalised], numbers),
        )


def _uniforms(rows: Sequence[RowRequest], draws: Ints) -> Floats:
    seeds = np.array([row.settings.seed for row in rows], dtype=np.uint64)
    positions = np.array([row.position for row in rows], dtype=np.uint64)
    indices = np.array([row.sample_index for row in rows], dtype=np.int64)
    if (draws != 1).any():
        within = np.arange(draws.sum()) - np.repeat(np.cumsum(draws) - draws, draws)
        seeds, indices, positions = np.repeat(seeds, draws), np.repeat(indices, draws) + within, np.repeat(positions, draws)
    return uniforms(seeds, indices.astype(np.uint64), positions)


def _entries(found: Sequence[tuple[int, Ints]]) -> Entries:
    """Some token ids of some rows, as (row, ids)."""
    found = [(index, ids) for index, ids in found if len(ids)]
    if not found:
        return _NO_ENTRIES
    rows, ids = zip(*found, strict=True)
    return Entries(np.repeat(np.array(rows, dtype=np.int64), [len(part) for part in ids]), np.concatenate(ids))


def _banned(row: RowRequest) -> list[Ints]:
    """Token ids that may not follow this row's output, perhaps some of them twice."""
    settings = row.settings
    banned = [settings.banned]
    if row.num_output < settings.min_tokens:
        banned.append(settings.stop_ids)
    if settings.bad_words:
        output = row.output
        completing = [word.last for word in settings.bad_words if output[-len(word.beginning) :] == word.beginning]
        banned.append(np.array(completing, dtype=np.int64))
    return banned


def _biases(found: Sequence[tuple[int, RowRequest]]) -> Biases | None:
    entries = _entries([(index, row.settings.bias_ids) for index, row in found])
    if not len(entries):
        return None
    return Biases(entries, np.concatenate([row.settings.bias for _, row in found]).astype(np.float32))


def _penalties(found: Sequence[tuple[int, RowRequest]], numbers: Floats) -> Penalties | None:
    counted = [(index, row.counts.ids, row.counts.counts) for index, row in found if row.counts is not None]
    entries = _entries([(index, ids) for index, ids, _ in counted])
    if not len(entries):
        return None
    counts = np.concatenate([part for _, _, part in counted])
    repetition, frequency, presence = numbers[:, 4:].T[:, entries.rows]
    return Penalties(entries, repetition.astype(np.float32), (frequency * counts + presence * (counts > 0)).astype(np.float32))

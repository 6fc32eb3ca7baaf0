"""What the sampler is told of each row of logits, as arrays: built once a step from the requests' parameters.

Must not know: torch, requests, plans, logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.core.random_numbers import uniforms
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.core.grammar.compiler import Matcher

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """One row of logits: how to draw from it.

    `draws` tokens are drawn, with sample indices from `sample_index` on (more than one where a request's samples part after their
    common prompt). A row of beams draws none and asks for its `candidates` most likely tokens instead.
    """

    params: SamplingParams
    seed: int  # the request's, chosen by the engine where its params have none
    sample_index: int
    position: int  # of the token to be drawn
    num_output: int  # tokens that its output holds already
    stop_ids: Collection[int] = ()  # not drawn before params.min_tokens
    draws: int = 1
    candidates: int = 0
    grammar: Matcher | None = None  # what its output must follow, as far as that has come


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """The same for all R rows of a step, N draws in all. What is off has its neutral value."""

    temperature: Floats  # [R], 0: greedy
    top_k: Ints  # [R], 0: off
    top_p: Floats  # [R], 1: off
    min_p: Floats  # [R], 0: off
    draws: Ints  # [R]
    uniforms: Floats  # [N], those of a row next to each other
    candidates: Ints  # [R], 0: not a row of beams
    banned: Ints  # [M, 2]: row and token id that must not be drawn

    @classmethod
    def build(cls, rows: Sequence[RowRequest]) -> SamplingRows:
        """From one record for each row of logits, in their order."""
        params = [row.params for row in rows]
        draws = np.array([row.draws for row in rows], dtype=np.int64)
        temperature = np.array([0.0 if p.greedy else p.temperature for p in params])
        return cls(
            temperature=temperature,
            top_k=np.array([p.top_k for p in params], dtype=np.int64),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
            draws=draws,
            uniforms=_uniforms(rows, draws) if temperature.any() else np.zeros(int(draws.sum())),
            candidates=np.array([row.candidates for row in rows], dtype=np.int64),
            banned=np.array(
                [
                    (index, token)
                    for index, row in enumerate(rows)
                    if row.num_output < row.params.min_tokens
                    for token in sorted(row.stop_ids)
                ],
                dtype=np.int64,
            ).reshape(-1, 2),
        )

    @property
    def all_greedy(self) -> bool:
        """Whether the step's tokens are simply the argmax of each row, so that logits need not leave the model."""
        return not (self.temperature.any() or self.candidates.any() or len(self.banned) or (self.draws != 1).any())


def _uniforms(rows: Sequence[RowRequest], draws: Ints) -> Floats:
    seeds = np.array([row.seed & (2**64 - 1) for row in rows], dtype=np.uint64)
    positions = np.array([row.position for row in rows], dtype=np.uint64)
    firsts = np.array([row.sample_index for row in rows], dtype=np.int64)
    within = np.arange(draws.sum()) - np.repeat(np.cumsum(draws) - draws, draws)
    indices = (np.repeat(firsts, draws) + within).astype(np.uint64)
    return uniforms(np.repeat(seeds, draws), indices, np.repeat(positions, draws))

"""Rows with top-k, top-p or min-p: what their filters keep, and a draw from it, in two ways that give the same tokens.

`draw_by_sorting`, here, sorts all logits and never waits for the device. On a CPU that takes 100 ms for 64 rows of 50,000, and
`octavo.core.sampling_contenders` a few. Masses are rounded to multiples of 2**-32, so that their sums in double precision are exact,
whatever their order: hence the same tokens.

The rules are those of transformers: temperature, top-k, top-p, min-p. All tokens tied with the k-th likeliest are kept by top-k; of
those tied at the edge of top-p, the lowest ids, as many as it takes. A draw inverts the distribution function in the order of ids.

Symbols: r rows, V vocabulary, n draws, D most draws of a row. Must not know: requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.arrays import Floats, Ints
from octavo.core.logits_processing import as_tensor
from octavo.core.sampling_blocks import masses

GRAIN = 2.0**-32  # masses are multiples of it
_ROUNDING = 2.0**20  # of its neighbours, doubles hold multiples of the grain
Doubles = TypeVar("Doubles", torch.Tensor, Floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredRows:
    """r rows of logits with finite greatest logits, and n draws from them."""

    rows: Ints  # [r], ascending, of all rows of logits
    top_k: Floats  # [r], infinite: off
    top_p: Floats  # [r], 1: off
    min_p: Floats  # [r], 0: off
    best: torch.Tensor  # [r], the greatest logits
    scale: torch.Tensor  # [r], see sampling_blocks.scales
    totals: torch.Tensor  # [r] fp64, masses of all tokens; anything where top-k is on or top-p off
    uniforms: Floats  # [n]
    owners: Ints  # [n], ascending, of which of the r rows

    def take(self, chosen: Ints) -> tuple[FilteredRows, Ints]:
        """Some of the r rows, ascending; and which of the n draws are theirs."""
        places = np.full(len(self.rows), -1)
        places[chosen] = np.arange(len(chosen))
        draws = np.flatnonzero(places[self.owners] >= 0)
        index = torch.from_numpy(chosen).to(self.best.device)
        part = FilteredRows(
            rows=self.rows[chosen],
            top_k=self.top_k[chosen],
            top_p=self.top_p[chosen],
            min_p=self.min_p[chosen],
            best=self.best[index],
            scale=self.scale[index],
            totals=self.totals[index],
            uniforms=self.uniforms[draws],
            owners=places[self.owners[draws]],
        )
        return part, draws


def rounded(mass: Doubles) -> Doubles:
    """Masses as multiples of the grain: what is a ten-thousand-millionth as likely as the likeliest token may count as nothing."""
    return (mass + _ROUNDING) - _ROUNDING


def draw_by_sorting(logits: torch.Tensor, filtered: FilteredRows) -> torch.Tensor:
    """logits [R, V] -> ids [n]."""
    vocab = logits.shape[1]
    logits = logits[as_tensor(filtered.rows, logits)]
    top_k, top_p, min_p = (_column(setting, logits) for setting in (filtered.top_k, filtered.top_p, filtered.min_p))
    best, scale = filtered.best[:, None], filtered.scale[:, None]
    values = logits.sort(descending=True).values
    kth = values.gather(1, top_k.clamp(max=vocab).long() - 1)
    limited = top_k < vocab
    mass = masses(values, best, scale)
    weights = rounded(mass.double()) * ((values >= kth) | ~limited)
    total = torch.where(limited, weights.sum(-1, keepdim=True), filtered.totals[:, None])
    wanted = torch.where(top_p < 1, top_p * total, torch.inf)
    kept = (weights.cumsum(-1) - weights < wanted) & (mass >= min_p) & (weights > 0)  # the first so many: each condition is of a prefix
    edge = values.gather(1, kept.sum(-1, keepdim=True).clamp(min=1) - 1)  # the smallest value that is kept,
    places = (kept & (values == edge)).sum(-1, keepdim=True)  # and how many tokens of that value

    tied = logits == edge
    kept = (logits > edge) | (tied & (tied.cumsum(-1) <= places))
    cumulative = (rounded(masses(logits, best, scale).double()) * kept).cumsum(-1)
    row, column, uniforms = side_by_side(filtered.uniforms, filtered.owners, len(filtered.rows))
    target = (as_tensor(uniforms, logits) * cumulative[:, -1:] / GRAIN).floor_() * GRAIN  # below the last, as uniforms are below 1
    drawn = torch.searchsorted(cumulative, target, right=True).clamp_(max=vocab - 1)  # NaN stays inside by the clamp
    return drawn[as_tensor(row, logits), as_tensor(column, logits)]


def side_by_side(uniforms: Floats, owners: Ints, rows: int) -> tuple[Ints, Ints, Floats]:
    """The uniforms of r rows as [r, D], zeros behind a row's last draw; and where in it each of the n draws stands."""
    draws = np.bincount(owners, minlength=rows)
    columns = np.arange(len(owners)) - np.repeat(np.cumsum(draws) - draws, draws)
    table = np.zeros((rows, int(draws.max(initial=0))))
    table[owners, columns] = uniforms
    return owners, columns, table


def _column(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return as_tensor(values, like).unsqueeze(1)

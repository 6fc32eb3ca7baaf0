"""The fast way on a CPU to draw from filtered rows: look at the few tokens that are likely enough, the contenders, and sort fewer still.

Every filter keeps a beginning of the tokens in falling order. A row's contenders are all tokens above a bound that is known beforehand
not to cut into what is kept, or is seen afterwards not to have done so; where it did, the row is done again with a lower one. So the
bound changes no token, and neither does any other row. With real logits there are some hundreds of contenders of 50,000 tokens.

Contenders of all rows stand in flat arrays, row after row, ids ascending. Where a filter's edge lies is found by a histogram over the
logarithm of their masses; only the bin with the edge is sorted.

Symbols: r rows, V vocabulary, n draws, C contenders. Must not know: requests, devices other than CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from octavo.core.arrays import Bools, Float32s, Floats, Ints
from octavo.core.sampling_blocks import Peaks, runs
from octavo.core.sampling_filters import GRAIN, FilteredRows, rounded

FIRST_GUESS = 16.0  # of SmolLM2's rows at temperature 1 and top-p 0.9, one in hundreds needs a second one
_GUESSES = (2.0, 0.5)  # the next ones; below 1 it is none: all that top-p drops would not be enough to stand just below the bound
_NO_MASS = 34.0  # binary orders below the likeliest token, where masses are rounded to 0
_BINS = 16  # in a binary order
_AT_ONCE = 8  # rows that are searched together, so that they stay in the cache
_MOST = 2**20  # contenders of one histogram, unless one row has more: sums of fewer masses than twice this are exact


class Contenders(NamedTuple):
    """C tokens of r rows."""

    ids: Ints  # [C], ascending within a row
    counts: Ints  # [r], how many are each row's
    rows: Ints  # [C], ascending
    values: Float32s  # [C], logits
    mass: Float32s  # [C]
    bins: Ints  # [C], falls as values rise


def draw_from_contenders(logits: torch.Tensor, filtered: FilteredRows, peaks: Peaks, *, guess: float = FIRST_GUESS) -> Ints:
    """logits [R, V] on a CPU -> ids [n]. A higher `guess` bets on fewer contenders, 0 on none."""
    drawn = np.empty(len(filtered.owners), dtype=np.int64)
    least, guessed = _bounds(logits, filtered, peaks, guess)
    missed: list[Ints] = []
    for begin, end, flat in _search(logits, filtered.rows, least):
        part, draws = (filtered, slice(None)) if end - begin == len(filtered.rows) else filtered.take(np.arange(begin, end))
        drawn[draws], short = _draw(part, _contenders(logits, part, flat - begin * logits.shape[1]))
        missed.append(begin + np.flatnonzero(short & guessed[begin:end]))
    again = np.concatenate(missed)
    if len(again):
        part, draws = filtered.take(again)
        lower = next((other for other in _GUESSES if other < guess), 0.0)
        drawn[draws] = draw_from_contenders(logits, part, peaks, guess=lower)
    return drawn


def _bounds(logits: torch.Tensor, filtered: FilteredRows, peaks: Peaks, guess: float) -> tuple[Float32s, Bools]:
    """A logit for each row that contenders reach, and whether it may turn out too high."""
    vocab, best = logits.shape[1], filtered.best.numpy()
    limited, nucleus = np.isfinite(filtered.top_k), filtered.top_p < 1
    with np.errstate(divide="ignore"):
        by_top_p = np.where(nucleus & ~limited, -np.log2(guess * (1 - filtered.top_p) * filtered.totals.numpy() / vocab), np.inf)
        by_min_p = np.where(limited, np.inf, -np.log2(filtered.min_p))  # top-p is a share of all that top-k keeps
    otherwise = np.minimum(by_min_p, _NO_MASS)
    depth = np.maximum(np.minimum(by_top_p, otherwise), 0.0)
    rounding = 1e-5 * depth / filtered.scale.numpy() + 4 * np.spacing(np.abs(best))
    least = (best - depth / filtered.scale.numpy() - rounding).astype(np.float32)
    if limited.any():
        chosen = np.flatnonzero(limited)
        least[chosen] = np.maximum(least[chosen], _kth_at_least(logits, filtered.rows[chosen], filtered.top_k[chosen], peaks))
    return least, by_top_p < otherwise


def _kth_at_least(logits: torch.Tensor, rows: Ints, top_k: Floats, peaks: Peaks) -> Float32s:
    """Not above the k-th greatest logit: k blocks reach as high."""
    k = torch.from_numpy(top_k.astype(np.int64))
    most = int(k.max())
    source = peaks.of_blocks if most <= peaks.of_blocks.shape[1] else logits
    greatest = source[torch.from_numpy(rows)].topk(most).values
    return greatest.gather(1, k[:, None] - 1).squeeze(1).numpy()


def _search(logits: torch.Tensor, rows: Ints, least: Float32s) -> Iterator[tuple[int, int, Ints]]:
    """Slices of `rows`, and where what reaches `least` stands among their logits, as row in `rows` x V + id."""
    host, vocab = logits.numpy(), logits.shape[1]
    space = np.zeros(-(-_AT_ONCE * vocab // 8) * 8, dtype=np.bool_)
    begun, size = 0, 0
    found: list[Ints] = []
    for begin, end in runs(rows, _AT_ONCE):
        part = host[rows[begin] : rows[begin] + end - begin]
        length = part.size
        np.greater_equal(part, least[begin:end, None], out=space[:length].reshape(part.shape))
        space[length : -(-length // 8) * 8] = False
        found.append(_true_of(space[: -(-length // 8) * 8]) + begin * vocab)
        size += len(found[-1])
        if size > _MOST - _AT_ONCE * vocab or end == len(rows):
            yield begun, end, np.concatenate(found)
            begun, found, size = end, [], 0


def _true_of(bools: Bools) -> Ints:
    """`np.flatnonzero`, of eight at a time and then within the eights: faster where few are true, and half the contenders' cost."""
    words = bools.view(np.uint64)
    eights = np.flatnonzero(words != 0)
    within = np.flatnonzero(words[eights].view(np.bool_))
    found: Ints = eights[within >> 3] * 8 + (within & 7)
    return found


def _contenders(logits: torch.Tensor, filtered: FilteredRows, flat: Ints) -> Contenders:
    vocab, r = logits.shape[1], len(filtered.rows)
    counts = np.diff(np.searchsorted(flat, np.arange(r + 1) * vocab))
    rows = np.repeat(np.arange(r), counts)
    values = logits.view(-1).numpy()[flat + np.repeat((filtered.rows - np.arange(r)) * vocab, counts)]
    log2_mass = values - np.repeat(filtered.best.numpy(), counts)  # as in sampling_blocks.masses
    log2_mass *= np.repeat(filtered.scale.numpy(), counts)
    bins = np.minimum(log2_mass * -_BINS, _BINS * _NO_MASS).astype(np.int32)
    mass = torch.from_numpy(log2_mass).exp2_().numpy()
    return Contenders(flat - np.repeat(np.arange(r) * vocab, counts), counts, rows, values, mass, bins)


def _draw(filtered: FilteredRows, tokens: Contenders) -> tuple[Ints, Bools]:
    """The drawn ids [n], and which of the r rows [r] have contenders with less mass than top-p asks for."""
    counts, r = tokens.counts, len(filtered.rows)
    stops = counts.cumsum()
    weights = rounded(tokens.mass.astype(np.float64))
    totals = filtered.totals.numpy()
    limited, nucleus = np.isfinite(filtered.top_k), filtered.top_p < 1
    if limited.any():
        first, _ = _leading(tokens, np.ones(len(weights)), filtered.top_k)
        kth = np.minimum.reduceat(np.where(first, tokens.values, np.inf), stops - counts)
        weights *= tokens.values >= np.repeat(kth, counts)  # those that tie with the k-th stay
        totals = np.where(limited, np.bincount(tokens.rows, weights, minlength=r), totals)
    short = np.zeros(r, dtype=np.bool_)
    if nucleus.any():
        kept, short = _leading(tokens, weights, np.where(nucleus, filtered.top_p * totals, np.inf))
        weights *= kept
    if filtered.min_p.any():
        weights *= tokens.mass >= np.repeat(filtered.min_p, counts)
    cumulative = weights.cumsum()
    ends = cumulative[stops - 1]
    bases = np.concatenate(([0.0], ends[:-1]))
    targets = np.floor(filtered.uniforms * (ends - bases)[filtered.owners] / GRAIN) * GRAIN  # below a row's last, as uniforms are below 1
    return tokens.ids[np.searchsorted(cumulative, bases[filtered.owners] + targets, side="right")], short


def _leading(tokens: Contenders, amounts: Floats, wanted: Floats) -> tuple[Bools, Bools]:
    """Of each row, the fewest tokens in falling order of value, of equal ones by id, whose amounts reach what is `wanted` [r].

    Returns which of the tokens [C], and which rows [r] never reach it.
    """
    counts, r = tokens.counts, len(wanted)
    bins = int(tokens.bins.max()) + 1
    sums = np.bincount(np.repeat(np.arange(r) * bins, counts) + tokens.bins, amounts, minlength=r * bins).reshape(r, bins)
    reached = sums.cumsum(axis=1)
    edge = (reached < wanted[:, None]).sum(axis=1)  # the bin in which it is reached, [r]; behind the last: in none
    edges = np.repeat(edge, counts)
    leading: Bools = tokens.bins < edges
    at = np.flatnonzero(tokens.bins == edges)
    at = at[np.lexsort((-tokens.values[at], tokens.rows[at]))]  # keeps the order of ids
    row = tokens.rows[at]
    short = edge == bins
    last = np.minimum(edge, bins - 1)
    before = (reached - sums)[np.arange(r), last]  # what the bins before reach: exact, see `rounded`
    cumulative = np.concatenate(([0.0], amounts[at].cumsum()))
    in_bin = np.bincount(row, minlength=r)
    before -= cumulative[in_bin.cumsum() - in_bin]  # and less what stands before the row
    leading[at[before[row] + cumulative[:-1] < wanted[row]]] = True
    return leading, short

"""`Sampler`: logits to token ids, for rows of any mixture of settings at once.

A row's tokens depend on its logits, its settings and its uniform numbers alone: not on its neighbours, nor on the order of rows.
The order of filters is that of transformers: temperature, top-k, top-p, min-p. All tokens tied with the k-th likeliest are kept by
top-k; of those tied at the edge of top-p, the lowest ids, as many as it takes. A draw inverts the distribution function in the
order of ids. Nothing here waits for the device: the caller fetches the result, once a step.

Symbols: R rows of logits, N draws in all, V vocabulary; r rows of one group, D most draws of a row, W candidates.
Must not know: requests, plans, models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.grammar.masks import Masks
from octavo.core.sampling_rows import SamplingRows

Bools = npt.NDArray[np.bool_]


class Candidates(NamedTuple):
    """For the rows of beams, in their order: the most likely tokens, best first, of equal ones the lowest id first."""

    rows: list[int]
    token_ids: torch.Tensor  # [len(rows), most candidates asked for] int64
    log_probs: torch.Tensor  # the same shape, fp32, of the whole vocabulary (temperature and filters have no part in it)


class Sampled(NamedTuple):
    """What a step's logits became."""

    token_ids: torch.Tensor  # [N] int64, draws of a row next to each other; -1: the row has no finite maximum (NaN, or all banned)
    candidates: Candidates | None


class Filters(NamedTuple):
    """Settings of r rows that need their logits in order; each [r, 1]."""

    top_k: torch.Tensor  # V: off
    top_p: torch.Tensor  # 2: off, so that rounding drops nothing
    min_p: torch.Tensor  # 0: off

    def take(self, rows: torch.Tensor) -> Filters:
        """Those of some rows."""
        return Filters(*(setting[rows] for setting in self))


class Sampler:
    """Stateless: what a request's next draw depends on travels in `SamplingRows`.

    `prefilter`: on a CPU, top-k and top-p first look at so many of the likeliest tokens, which costs a seventh of a sort.
    """

    def __init__(self, *, prefilter: int = 1024) -> None:
        self._prefilter = prefilter

    def sample(self, logits: torch.Tensor, rows: SamplingRows, masks: Masks | None = None) -> Sampled:
        """logits [R, V], in which it may write -> N token ids, and the candidates of beams. `masks` for rows that have a grammar."""
        logits = process_logits(logits.float(), rows)
        if masks is not None:
            forbid(logits, masks)
        best, best_ids = logits.max(dim=-1)  # torch documents that the first maximum wins
        row_of = np.repeat(np.arange(len(rows.draws)), rows.draws)  # [N]
        tokens = best_ids[_tensor(row_of, logits)]
        random = (rows.temperature > 0) & (rows.draws > 0)
        filtered = random & (((rows.top_k > 0) & (rows.top_k < logits.shape[1])) | (rows.top_p < 1))
        for group, draw in ((random & ~filtered, self._draw), (filtered, self._draw_filtered)):
            chosen = np.flatnonzero(group[row_of])  # [n] of the N draws
            if len(chosen):
                index = _tensor(np.flatnonzero(group), logits)
                scaled = (
                    logits[index].sub_(best[index, None]).div_(_column(rows.temperature[group].astype(np.float32), logits))
                )  # at most 0: no overflow
                row, column, uniforms = _side_by_side(rows, group)
                drawn = draw(scaled, _filters(rows, group, logits), _tensor(uniforms, logits))  # [r, D]
                tokens[_tensor(chosen, logits)] = drawn[_tensor(row, logits), _tensor(column, logits)]
        tokens.masked_fill_(~best.isfinite()[_tensor(row_of, logits)], -1)
        return Sampled(tokens, _candidates(logits, rows))

    def _draw(self, scaled: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
        """From all tokens not below min-p: needs no order."""
        mass = scaled.exp_()
        mass.masked_fill_(mass < filters.min_p, 0.0)
        return _invert(mass.cumsum(-1, dtype=torch.float64), uniforms)

    def _draw_filtered(self, scaled: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
        """Look at few of the likeliest tokens, then for the rows that they cannot decide at eight times as many, and so on."""
        vocab = scaled.shape[1]
        width = self._prefilter if scaled.device.type == "cpu" else vocab  # on a device, looking whether it was enough would wait for it
        if width >= vocab:
            return _draw_among(vocab, scaled, filters, uniforms)[0]
        tokens, undecided = _draw_among(width, scaled, filters, uniforms)
        if undecided.any():
            rest = undecided.nonzero().squeeze(1)
            tokens[rest] = Sampler(prefilter=8 * width)._draw_filtered(scaled[rest], filters.take(rest), uniforms[rest])
        return tokens


def process_logits(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """What changes logits before anything is chosen: tokens that may not come yet get -inf. Works in place."""
    if len(rows.banned):
        row, token = _tensor(rows.banned, logits).unbind(1)
        logits[row, token] = -torch.inf
    return logits


def forbid(logits: torch.Tensor, masks: Masks) -> None:
    """logits [R, V]: what a grammar does not allow gets -inf. Works in place."""
    octets = _tensor(masks.bits.view(np.uint8), logits)  # [S, 4 W]: bit 0 of a word's first octet is its first token
    bits = (octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    rows = _tensor(np.array(masks.rows, dtype=np.int64), logits)
    logits[rows] = logits[rows].masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def _draw_among(width: int, scaled: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter and draw, looking at the `width` likeliest of the V tokens.

    scaled [r, V], uniforms [r, D] -> tokens [r, D], undecided [r]: whether tokens that were not looked at have a say in what is kept.
    """
    vocab, (top_k, top_p, min_p) = scaled.shape[1], filters
    values, ids = scaled.topk(width) if width < vocab else scaled.sort(descending=True)  # [r, W]
    weights = values.exp()
    limited = top_k < vocab
    kth = values.gather(1, top_k.clamp(max=width) - 1)
    within_k = (values >= kth) | ~limited
    mass = weights.double() * within_k
    total = mass.sum(-1, keepdim=True)
    if width < vocab:
        total = torch.where(limited, total, scaled.exp().sum(-1, keepdim=True, dtype=torch.float64))
    kept = within_k & (mass.cumsum(-1) - mass < top_p * total) & (weights >= min_p)  # the first so many: each condition holds for a prefix
    kept[:, 0] = True
    edge = values.gather(1, kept.sum(-1, keepdim=True) - 1)  # the smallest value that is kept,
    places = (kept & (values == edge)).sum(-1, keepdim=True)  # and how many tokens of that value
    least = values[:, -1:]
    undecided = ((limited & (kth <= least)) | (edge <= least)).squeeze(1)

    if width < vocab:
        ids, order = ids.sort(-1)
        values = values.gather(1, order)
    else:
        values = scaled
    tied = values == edge
    kept = (values > edge) | (tied & (tied.cumsum(-1) <= places))
    drawn = _invert((values.exp().double() * kept).cumsum(-1), uniforms)
    return (ids.gather(1, drawn) if width < vocab else drawn), undecided


def _invert(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """cumulative [r, W] fp64 not normalised, uniforms [r, D] in [0, 1) -> the columns [r, D] in which they fall.

    52-bit uniforms times the total stay below the total, so a column without mass is never hit; NaN stays inside by the clamp.
    """
    drawn = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return drawn.clamp_(max=cumulative.shape[1] - 1)


def _candidates(logits: torch.Tensor, rows: SamplingRows) -> Candidates | None:
    asking = np.flatnonzero(rows.candidates)
    if not len(asking):
        return None
    log_probs = logits[_tensor(asking, logits)].log_softmax(-1)
    values, ids = log_probs.topk(min(int(rows.candidates.max()), logits.shape[1]))
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(stable=True, dim=-1, descending=True)
    return Candidates(asking.tolist(), ids.gather(1, by_value), values)


def _filters(rows: SamplingRows, group: Bools, like: torch.Tensor) -> Filters:
    vocab = like.shape[1]
    top_k = np.where(rows.top_k > 0, np.minimum(rows.top_k, vocab), vocab)
    top_p = np.where(rows.top_p < 1, rows.top_p, 2.0)
    return Filters(*(_column(setting[group], like) for setting in (top_k, top_p, rows.min_p.astype(np.float32))))


def _side_by_side(rows: SamplingRows, group: Bools) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The uniforms of a group's rows as [r, D], zeros behind a row's last draw; and where in it each of the group's n draws stands."""
    draws = rows.draws[group]
    row = np.repeat(np.arange(len(draws)), draws)
    column = np.arange(len(row)) - np.repeat(np.cumsum(draws) - draws, draws)
    uniforms = np.zeros((len(draws), int(draws.max())))
    uniforms[row, column] = rows.uniforms[np.repeat(group, rows.draws)]
    return row, column, uniforms


def _column(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return _tensor(values, like).unsqueeze(1)


def _tensor(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)

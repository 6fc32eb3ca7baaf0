"""Rows of logits seen as blocks of neighbouring tokens: their maxima, their masses, and a draw that reads two blocks a token.

The mass of a token is its probability over the likeliest one's, so at most 1. A pass over all logits costs a millisecond for 64 rows
of 50,000 on two cores, so there are as few as can be, and each goes over rows that are still in the processor's cache.
Each sum is over one block of one row: no result depends on which rows are together.

Symbols: R rows of logits, r of them, V vocabulary, B blocks, D draws of a row. Must not know: requests, filters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from octavo.core.arrays import Float32s, Floats, Ints

BLOCK = 128  # tokens
_AT_ONCE = 8  # rows whose masses are computed together on a CPU
_LOG2_E = math.log2(math.e)


class Peaks(NamedTuple):
    """The greatest logits."""

    of_blocks: torch.Tensor  # [R, B]
    of_rows: torch.Tensor  # [R]
    ids: torch.Tensor  # [R] int64, of the rows' greatest logits, the lowest of equal ones


def find_peaks(logits: torch.Tensor) -> Peaks:
    """logits [R, V]. NaN counts as the greatest. (`torch.argmax` takes five times as long on a CPU.)"""
    peaks = _blockwise(torch.amax, logits)
    best, block = peaks.max(dim=-1)  # torch documents that the first maximum wins
    ids = _ids_of(block, logits.shape[1])  # [R, BLOCK]
    within = logits.gather(1, ids).max(dim=-1).indices
    return Peaks(peaks, best, ids.gather(1, within[:, None]).squeeze(1))


def scales(temperature: Floats) -> Float32s:
    """What a logit's distance from the greatest is multiplied by to give the binary logarithm of its mass."""
    return (_LOG2_E / temperature).astype(np.float32)


def masses(logits: torch.Tensor, best: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """logits of any shape; of their rows, broadcast: the greatest logits, and scales. (exp2 takes a third of exp's time on a CPU.)"""
    return (logits - best).mul_(scale).exp2_()


def block_masses(logits: torch.Tensor, rows: Ints, *, best: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sums of the masses of each block, [r, B] fp32, of these rows. best, scale: [r]."""
    best, scale = best[:, None], scale[:, None]
    if logits.device.type != "cpu":
        return _blockwise(torch.sum, masses(logits[torch.from_numpy(rows).to(logits.device)], best, scale))
    sums = torch.empty(len(rows), -(-logits.shape[1] // BLOCK))
    space = torch.empty(min(_AT_ONCE, len(rows)), logits.shape[1])  # always the same memory, instead of as much as the logits take
    for begin, end in runs(rows, _AT_ONCE):
        first = int(rows[begin])
        part = space[: end - begin]
        torch.sub(logits[first : first + end - begin], best[begin:end], out=part)
        sums[begin:end] = _blockwise(torch.sum, part.mul_(scale[begin:end]).exp2_())
    return sums


def runs(rows: Ints, longest: int) -> Iterator[tuple[int, int]]:
    """Cut ascending row numbers into runs of consecutive ones, as slices of `rows`."""
    begin = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or end - begin == longest or rows[end] != rows[end - 1] + 1:
            yield begin, end
            begin = end


def draw_from_blocks(
    logits: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor, *, best: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Invert the distribution function of whole rows: logits [r, V], sums [r, B], uniforms [r, D] in [0, 1) -> ids [r, D].

    First the block in which a uniform falls, then, at the same share of what its masses add up to, the token.
    """
    vocab = logits.shape[1]
    wide = sums.double()
    cumulative = wide.cumsum(-1)
    target = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)  # [r, D]; NaN stays inside by the clamp
    mass = wide.gather(1, block)
    share = (target - (cumulative.gather(1, block) - mass)) / mass
    ids = _ids_of(block, vocab)  # [r, D, BLOCK]
    values = logits.gather(1, ids.flatten(1)).view(ids.shape)
    within = masses(values, best[:, None, None], scale[:, None, None]).double()
    within.mul_(block[..., None] * BLOCK + torch.arange(BLOCK, device=ids.device) < vocab)  # what stands twice in the last block
    within = within.cumsum(-1)
    place = (within <= share[..., None] * within[..., -1:]).sum(-1, keepdim=True)
    last = within.max(dim=-1, keepdim=True).indices  # the last one that has a mass, for shares that rounding made 1
    return ids.gather(2, torch.minimum(place, last)).squeeze(2)


def _blockwise(reduce: Callable[..., torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """[r, V] -> [r, B]; the last block may be shorter."""
    whole = values.shape[1] // BLOCK * BLOCK
    blocks = reduce(values[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)), -1) if whole else values[:, :0]
    if whole == values.shape[1]:
        return blocks
    return torch.cat((blocks, reduce(values[:, whole:], -1, keepdim=True)), dim=1)


def _ids_of(block: torch.Tensor, vocab: int) -> torch.Tensor:
    """The ids of blocks' tokens, [..., BLOCK]; the last of the vocabulary again and again where a block is shorter."""
    return (block[..., None] * BLOCK + torch.arange(BLOCK, device=block.device)).clamp_(max=vocab - 1)

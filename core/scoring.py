"""`score_rows`: what logits say of tokens: their log probabilities and ranks, and the likeliest tokens beside them.

Of the model's own logits in fp32, before any sampling setting. A slice of rows at a time, so that a long prompt takes no more memory
than a short one. Nothing here waits for the device: `Scores.entries` does, when the step is fetched.

Symbols: M tokens that are scored, each with a row of logits of its own; V vocabulary; K most likely tokens asked for, of all rows
together. Must not know: requests, plans, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from octavo.core.arrays import Ints
from octavo.core.logprobs import LEAST, TokenLogprobs

MAX_ROWS = 128
"""Rows of logits that are made and looked at at once. Enough for a GPU to be busy with the LM head; with a vocabulary of 151,936 they
take 74 MiB in fp32, and some 300 MiB more while the likeliest tokens are searched."""

_LOW = 0xFFFFFFFF


class Scores(NamedTuple):
    """Tensors that the device may still be working on."""

    token_ids: torch.Tensor  # [M] int64
    logprobs: torch.Tensor  # [M] fp32, NaN where a row's logits are not finite
    ranks: torch.Tensor  # [M] int64
    top_ids: torch.Tensor  # [K] int64, of each row as many as were asked for, best first, of equal logits the lowest id first
    top_logprobs: torch.Tensor  # [K] fp32
    num_top: Ints  # [M], K in all

    def entries(self) -> list[TokenLogprobs]:
        """On the host, in order."""
        top = list(zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True))
        stops = np.cumsum(self.num_top).tolist()
        columns = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), self.num_top.tolist(), stops, strict=True)
        return [TokenLogprobs(token, value, rank, tuple(top[stop - count : stop])) for token, value, rank, count, stop in columns]


def score_rows(logits_of: Callable[[slice], torch.Tensor], token_ids: torch.Tensor, num_top: Ints) -> Scores:
    """Score `token_ids` [M] and find the `num_top` [M] likeliest tokens of each row.

    `logits_of` gives the logits [m, V] of a slice of at most MAX_ROWS rows, of any floating type; they are not written to.
    """
    parts = []
    for start in range(0, max(1, len(num_top)), MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        parts.append(_score(logits_of(rows).float(), token_ids[rows], num_top[rows]))
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return Scores(token_ids, logprobs, ranks, top_ids, top_logprobs, num_top)


def _score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Ints) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logprobs and ranks [m], ids and logprobs of the likeliest tokens [k]."""
    total = logits.logsumexp(-1, keepdim=True)
    total = torch.where(total.isfinite(), total, torch.nan)
    own = logits.gather(1, token_ids[:, None])  # [m, 1]
    ranks = (logits > own).sum(-1) + 1
    top = likeliest(logits, int(num_top.max(initial=0)))  # [m, most of num_top]
    within = np.flatnonzero(np.arange(top.shape[1]) < num_top[:, None])
    kept = torch.from_numpy(within).to(logits.device, non_blocking=True)
    top_logprobs = (logits.gather(1, top) - total).flatten()[kept]
    return (own - total).squeeze(1).clamp_(min=LEAST), ranks, top.flatten()[kept], top_logprobs.clamp_(min=LEAST)


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [m, count] of the largest of logits [m, V] fp32, of equal ones the lowest first: which `topk` leaves open.

    So a float becomes an integer that compares alike (the bits of a negative one are turned over), with the id in the low bits.
    """
    if not count:
        return logits.new_empty((len(logits), 0), dtype=torch.int64)
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.long()
    del bits
    keys <<= 32
    keys |= _LOW - torch.arange(logits.shape[1], device=logits.device)
    return _LOW - (keys.topk(count).values & _LOW)

"""`Sampler`: logits to token ids, for rows of any mixture of settings at once.

A row's tokens depend on its logits, its settings and its uniform numbers alone: not on its neighbours, nor on the order of rows.
What changes logits is in `logits_processing`, what filters keep in `sampling_filters`; a draw inverts the distribution function in the
order of ids. Nothing here waits for a GPU: the caller fetches the result, once a step.

Symbols: R rows of logits, N draws in all, V vocabulary; r rows of one group. Must not know: requests, plans, models.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.core.arrays import Bools, Ints
from octavo.core.logits_processing import as_tensor, process_logits
from octavo.core.sampling_blocks import Peaks, block_masses, draw_from_blocks, find_peaks, scales
from octavo.core.sampling_contenders import FIRST_GUESS, draw_from_contenders
from octavo.core.sampling_filters import FilteredRows, draw_by_sorting, side_by_side
from octavo.core.sampling_rows import SamplingRows
from octavo.core.scoring import likeliest

NOT_FINITE = -1  # instead of a token id: the greatest logit is NaN or infinite
NOTHING_LEFT = -2  # all tokens of the row are banned


class Candidates(NamedTuple):
    """For the rows of beams, in their order: the most likely tokens, best first, of equal ones the lowest id first."""

    rows: list[int]
    token_ids: torch.Tensor  # [len(rows), most candidates asked for] int64
    log_probs: torch.Tensor  # the same shape, fp32, of the whole vocabulary (temperature and filters have no part in it)


class Sampled(NamedTuple):
    """What a step's logits became."""

    token_ids: torch.Tensor  # [N] int64, draws of a row next to each other; negative: NOT_FINITE or NOTHING_LEFT
    candidates: Candidates | None
    errors: dict[int, str]  # rows that a user's logits processor spoilt, and how: their tokens mean nothing


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """logits [R, V] -> [R] int64: of each row the lowest id of the greatest logit; NOT_FINITE or NOTHING_LEFT where there is none."""
    best, ids = logits.max(dim=-1)  # torch documents that the first maximum wins; NaN counts as the greatest
    return torch.where(best.isfinite(), ids, torch.where(best == -torch.inf, NOTHING_LEFT, NOT_FINITE))


class Sampler:
    """Stateless: what a request's next draw depends on travels in `SamplingRows`.

    `guess`: see `draw_from_contenders`; infinite: filters sort all logits, as they do on a GPU. It changes no token.
    """

    def __init__(self, *, guess: float = FIRST_GUESS) -> None:
        self._guess = guess

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> Sampled:
        """logits [R, V], in which it may write -> N token ids, and the candidates of beams."""
        logits = logits.float().contiguous()
        errors = process_logits(logits, rows)
        peaks = find_peaks(logits)
        owners = np.repeat(np.arange(len(rows.draws)), rows.draws)  # [N]
        of_draws = as_tensor(owners, logits)
        tokens, best = peaks.ids[of_draws], peaks.of_rows[of_draws]
        if rows.temperature.any():
            self._draw(logits, rows, peaks, owners, tokens)
        tokens = torch.where(best.isfinite(), tokens, torch.where(best == -torch.inf, NOTHING_LEFT, NOT_FINITE))
        return Sampled(tokens, _candidates(logits, rows), errors)

    def _draw(self, logits: torch.Tensor, rows: SamplingRows, peaks: Peaks, owners: Ints, tokens: torch.Tensor) -> None:
        """Write into `tokens` [N] those of rows that draw at random; `owners` [N] are the draws' rows."""
        vocab = logits.shape[1]
        random = (rows.temperature > 0) & (rows.draws > 0)
        if logits.device.type == "cpu":
            random &= peaks.of_rows.isfinite().numpy()
        limited = (rows.top_k > 0) & (rows.top_k < vocab)
        nucleus = rows.top_p < 1
        filtered = random & (limited | nucleus | (rows.min_p > 0))
        plain = random & ~filtered
        summed = plain | (filtered & nucleus & ~limited)  # rows whose masses are wanted
        scale = as_tensor(scales(np.where(random, rows.temperature, 1.0)), logits)
        of_summed = np.flatnonzero(summed)
        chosen = as_tensor(of_summed, logits)
        sums = block_masses(logits, of_summed, best=peaks.of_rows[chosen], scale=scale[chosen])
        if plain.any():
            group, draws, mine = _group(plain, owners)
            row, column, uniforms = side_by_side(rows.uniforms[draws], mine, len(group))
            index = as_tensor(group, logits)
            drawn = draw_from_blocks(
                logits if plain.all() else logits[index],
                sums[as_tensor(np.flatnonzero(plain[summed]), logits)],
                as_tensor(uniforms, logits),
                best=peaks.of_rows[index],
                scale=scale[index],
            )
            tokens[as_tensor(draws, logits)] = drawn[as_tensor(row, logits), as_tensor(column, logits)]
        if filtered.any():
            group, draws, mine = _group(filtered, owners)
            index = as_tensor(group, logits)
            totals = torch.ones(len(rows.draws), dtype=torch.float64, device=logits.device)
            totals[chosen] = sums.double().cumsum(-1)[:, -1]
            wanted = FilteredRows(
                rows=group,
                top_k=np.where(limited, rows.top_k, np.inf)[group],
                top_p=rows.top_p[group],
                min_p=rows.min_p[group],
                best=peaks.of_rows[index],
                scale=scale[index],
                totals=totals[index],
                uniforms=rows.uniforms[draws],
                owners=mine,
            )
            tokens[as_tensor(draws, logits)] = self._draw_filtered(logits, wanted, peaks)

    def _draw_filtered(self, logits: torch.Tensor, wanted: FilteredRows, peaks: Peaks) -> torch.Tensor:
        if logits.device.type != "cpu" or self._guess == np.inf:
            return draw_by_sorting(logits, wanted)
        return torch.from_numpy(draw_from_contenders(logits, wanted, peaks, guess=self._guess))


def _group(chosen: Bools, owners: Ints) -> tuple[Ints, Ints, Ints]:
    """The rows that were chosen, their draws, and of which of the chosen rows each of these is."""
    draws = np.flatnonzero(chosen[owners])
    return np.flatnonzero(chosen), draws, (np.cumsum(chosen) - 1)[owners[draws]]


def _candidates(logits: torch.Tensor, rows: SamplingRows) -> Candidates | None:
    asking = np.flatnonzero(rows.candidates)
    if not len(asking):
        return None
    log_probs = logits[as_tensor(asking, logits)].log_softmax(-1)
    ids = likeliest(log_probs, min(int(rows.candidates.max()), logits.shape[1]))
    return Candidates(asking.tolist(), ids, log_probs.gather(1, ids))

"""Rows for the sampler's tests, and what must be drawn from them, computed slowly and plainly: one row, one token at a time, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.core.random_numbers import uniforms
from octavo.core.sampling_params import SamplingParams
from octavo.core.sampling_rows import RowRequest
from octavo.core.sampling_settings import RowSettings
from octavo.core.token_counts import TokenCounts

Floats = npt.NDArray[np.float64]


def make_row(
    *,
    seed: int = 0,
    sample_index: int = 0,
    draws: int = 1,
    candidates: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    position: int | None = None,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    **params: Any,
) -> RowRequest:
    """One row; `params` are SamplingParams'."""
    settings = RowSettings.of(SamplingParams(**({"max_tokens": None} | params)), seed=seed, stop_ids=stop_ids, bad_words=bad_words)
    if position is None:
        position = len(prompt) + len(output)
    tokens = list(output)
    counts = TokenCounts(prompt if settings.repeats else ()).follow(tokens)
    return RowRequest(settings, sample_index, position, len(tokens), draws, candidates, tuple(prompt), tokens, counts)


def processed(logits: npt.NDArray[Any], row: RowRequest) -> Floats:
    """Logits [V] after all that changes them; users' functions excepted."""
    settings, output = row.settings, list(row.output)
    x = logits.astype(np.float64)
    if len(settings.allowed):
        x[[token for token in range(len(x)) if token not in settings.allowed]] = -np.inf
    x[settings.banned] = -np.inf
    for word in settings.bad_words:
        if output[len(output) - len(word.beginning) :] == word.beginning and len(output) >= len(word.beginning):
            x[word.last] = -np.inf
    if row.num_output < settings.min_tokens:
        x[settings.stop_ids] = -np.inf
    for token, bias in zip(settings.bias_ids, settings.bias, strict=True):
        x[token] += bias
    for token in {*row.prompt, *output}:
        factor = settings.numbers.repetition
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        x[token] -= settings.numbers.frequency * output.count(token) + settings.numbers.presence
    return x


def distribution(x: Floats, row: RowRequest, *, nudge: float = 0.0) -> Floats:
    """Probabilities [V] from processed logits. `nudge` moves the edges of top-p and min-p a little, where rounding decides."""
    numbers = row.settings.numbers
    if numbers.temperature == 0:
        return np.eye(len(x))[int(x.argmax())]
    mass = np.exp((x - x.max()) / numbers.temperature)
    kept = np.ones(len(x), dtype=np.bool_)
    if 0 < numbers.top_k < len(x):
        kept = x >= np.sort(x)[-int(numbers.top_k)]
    if numbers.top_p < 1:
        wanted = (numbers.top_p + nudge) * mass[kept].sum()
        reached = 0.0
        for token in sorted(np.flatnonzero(kept), key=lambda token: (-x[token], token)):
            kept[token] = reached < wanted
            reached += mass[token]
    mass *= kept & (mass >= numbers.min_p * (1 - nudge))
    return mass / mass.sum()


def uniform(row: RowRequest, draw: int = 0) -> float:
    """The number that decides a draw."""
    triple = (row.settings.seed, row.sample_index + draw, row.position)
    return float(uniforms(*(np.array([part], dtype=np.uint64) for part in triple))[0])


def may_be_drawn(logits: npt.NDArray[Any], row: RowRequest, token: int, *, draw: int = 0, margin: float = 2e-5) -> bool:
    """Whether `token` is where the uniform falls in the distribution function, give or take what fp32 rounds."""
    x = processed(logits, row)
    for nudge in (0.0, 1e-6, -1e-6):
        probabilities = distribution(x, row, nudge=nudge)
        end = probabilities[: token + 1].sum()
        if probabilities[token] > 0 and end - probabilities[token] - margin <= uniform(row, draw) <= end + margin:
            return True
    return False

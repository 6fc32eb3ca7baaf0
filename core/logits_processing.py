"""What changes logits before anything is chosen from them: in the order of vLLM's V1 sampler.

Only allowed tokens, no bad words, no stop before `min_tokens`, biases, users' functions, penalties. Batched over rows but for users'
functions. Temperature and filters come after. Must not know: requests, plans.
"""

from __future__ import annotations

from traceback import format_exception_only
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.grammar.masks import Masks
from octavo.core.sampling_rows import Call, Entries, Penalties, SamplingRows


def process_logits(logits: torch.Tensor, rows: SamplingRows) -> dict[int, str]:
    """Changes logits [R, V], fp32 and contiguous, in place. Returns the rows that a user's function spoilt, and how."""
    flat = logits.view(-1)
    if len(rows.allowed):
        index = _index(rows.allowed, logits)
        kept = flat[index]
        logits.index_fill_(0, as_tensor(np.unique(rows.allowed.rows), logits), -torch.inf)
        flat[index] = kept
    if len(rows.banned):
        flat.index_fill_(0, _index(rows.banned, logits), -torch.inf)
    if rows.biases is not None:
        flat.index_add_(0, _index(rows.biases.entries, logits), as_tensor(rows.biases.added, logits))
    errors = {call.row: error for call in rows.calls if (error := _call(call, logits[call.row])) is not None}
    if rows.penalties is not None:
        _penalise(flat, _index(rows.penalties.entries, logits), rows.penalties)
    return errors


def forbid(logits: torch.Tensor, masks: Masks) -> None:
    """Of logits [R, V], what a grammar does not allow gets -inf, in place, before all else."""
    octets = as_tensor(masks.bits.view(np.uint8), logits)  # [S, 4 W]: bit 0 of a word's first octet is its first token
    bits = (octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    rows = as_tensor(np.array(masks.rows, dtype=np.int64), logits)
    logits[rows] = logits[rows].masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def as_tensor(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """On the device of `like`."""
    return torch.from_numpy(values).to(like.device, non_blocking=True)


def _index(entries: Entries, logits: torch.Tensor) -> torch.Tensor:
    """Where entries stand among all R x V logits."""
    return as_tensor(entries.rows * logits.shape[1] + entries.ids, logits)


def _penalise(flat: torch.Tensor, index: torch.Tensor, penalties: Penalties) -> None:
    values, repetition = flat[index], as_tensor(penalties.repetition, flat)
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[index] = values.sub_(as_tensor(penalties.subtracted, flat))


def _call(call: Call, row: torch.Tensor) -> str | None:
    """Let the row [V] go through its functions, each given a copy, since what it does to its argument after an error is not known."""
    for number, processor in enumerate(call.processors):
        name = f"logits_processors[{number}]"
        try:
            result = processor(call.prompt, call.output, row.clone())
        except Exception as error:
            return f"{name} raised {''.join(format_exception_only(error)).strip()}"  # which survives an error that cannot be printed
        if not isinstance(result, torch.Tensor):
            return f"{name} returned {type(result).__name__}: must return the logits, a tensor"
        if result.is_nested or result.layout is not torch.strided:
            return f"{name} returned a sparse or nested tensor: must return a dense one"
        given = (tuple(row.shape), row.dtype, row.device)
        if (tuple(result.shape), result.dtype, result.device) != given:
            returned = f"shape {tuple(result.shape)}, {result.dtype} on {result.device}"
            return f"{name} returned {returned}: must return shape {given[0]}, {given[1]} on {given[2]}"
        row.copy_(result)
    return None

"""What transformers says of tokens, and whether log probabilities agree with it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.core.logprobs import TokenLogprobs
from tests.models import reference_model

TOLERANCE = 1e-4  # of a value, in fp32; logits reach to 100


@functools.cache
def reference_logits(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """[T, V] fp32, the model run by transformers over all tokens at once, with no cache."""
    with torch.inference_mode():
        return reference_model(folder)(torch.tensor([tokens]), use_cache=False).logits[0].float()


def check_entries(entries: Sequence[TokenLogprobs], logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> None:
    """One entry for each of `token_ids` [N], as transformers' `logits` [N, V] have it: values within TOLERANCE, ids and ranks equal.

    Where two tokens are as near to each other as that, either may come first.
    """
    assert [entry.token_id for entry in entries] == list(token_ids)
    for entry, row in zip(entries, logits.log_softmax(-1), strict=True):
        own = float(row[entry.token_id])
        assert abs(entry.logprob - own) <= TOLERANCE
        surely, perhaps = int((row > own + TOLERANCE).sum()), int((row > own - TOLERANCE).sum())
        assert surely < entry.rank <= max(perhaps, surely + 1)
        best = row.topk(num_top).values.tolist()
        assert len(entry.top) == num_top
        assert len({token for token, _ in entry.top}) == num_top
        for (token, value), expected in zip(entry.top, best, strict=True):
            assert abs(value - expected) <= TOLERANCE
            assert abs(float(row[token]) - expected) <= TOLERANCE

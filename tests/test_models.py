"""The tiny test models see: transformers' greedy tokens come out of a right attention, and out of none of the wrong ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from octavo.core.model import Model
from tests import models
from tests.dense_attention import DenseAttention, greedy
from tests.models import FAMILIES, NEW_TOKENS, PROMPTS, reference_gap, reference_tokens, tiny


@functools.cache
def _model(family: str) -> Model:
    return models.load(tiny(family))


def _tokens(family: str, prompt: tuple[int, ...], *, shift_from: int | None = None, **faults: Any) -> tuple[int, ...]:
    model = _model(family)
    return tuple(greedy(model, prompt, NEW_TOKENS, attend=DenseAttention(model.layers, **faults), shift_from=shift_from))


def _late(prompt: tuple[int, ...]) -> int:
    """A position near the prompt's end, within any window; behind a prompt of one token."""
    return max(1, len(prompt) - 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_of_the_reference_is_near_a_tie(family: str) -> None:
    """The two largest logits are over 1e-3 apart at every step, so that rounding cannot change a token."""
    assert reference_gap(tiny(family), PROMPTS, NEW_TOKENS) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_right_attention_gives_the_tokens_of_transformers(family: str) -> None:
    """Every prompt continues as `generate` continues it."""
    assert tuple(_tokens(family, prompt) for prompt in PROMPTS) == reference_tokens(tiny(family), PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ["ignored context", "dropped token", "shifted positions", "swapped KV heads", "ignored window"])
def test_wrong_attention_changes_the_tokens_of_every_prompt(family: str, fault: str) -> None:
    """No prompt continues as `generate` continues it, unless the model has nothing that the fault could break (fault 53)."""
    layers = _model(family).layers
    blind = (fault == "swapped KV heads" and layers[0].num_kv_heads == 1) or (
        fault == "ignored window" and all(layer.window is None for layer in layers)
    )
    for prompt, right in zip(PROMPTS, reference_tokens(tiny(family), PROMPTS, NEW_TOKENS), strict=True):
        faults: dict[str, Any] = {
            "ignored context": {"only_self": True},
            "dropped token": {"dropped": _late(prompt)},
            "shifted positions": {"shift_from": _late(prompt)},
            "swapped KV heads": {"swap_kv_heads": True},
            "ignored window": {"no_window": True},
        }[fault]
        assert (_tokens(family, prompt, **faults) == right) == blind

"""The llama plugin computes what transformers computes, whole or in pieces, for every family and config entry that it accepts."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from octavo.core.model import Model
from octavo.plugins.models.llama import LLAMA
from tests import models
from tests.dense_attention import DenseAttention, greedy
from tests.models import FAMILIES, NEW_TOKENS, PROMPTS, reference_model, reference_tokens, tiny


@functools.cache
def _model(family: str) -> Model:
    return models.load(tiny(family))


def _logits(model: Model, prompt: tuple[int, ...], rows: list[int] | None = None) -> torch.Tensor:
    ids = torch.tensor(prompt)
    wanted = torch.arange(len(ids)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    return model.logits(model.forward(ids, torch.arange(len(ids)), DenseAttention(model.layers), rows=wanted))


def _reference_logits(folder: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return reference_model(folder)(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_logits_equal_transformers(family: str, prompt: tuple[int, ...]) -> None:
    """fp32 logits of all positions agree within 1e-4."""
    torch.testing.assert_close(_logits(_model(family), prompt), _reference_logits(tiny(family), prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("piece", [1, 3, 8])
def test_a_prompt_in_pieces_gives_the_same_tokens(family: str, piece: int) -> None:
    """Chunked prefill changes nothing."""
    model = _model(family)
    pieces = tuple(tuple(greedy(model, prompt, NEW_TOKENS, attend=DenseAttention(model.layers), piece=piece)) for prompt in PROMPTS)
    assert pieces == reference_tokens(tiny(family), PROMPTS, NEW_TOKENS)


def test_rows_select_and_order() -> None:
    """Rows come out in the order asked for, repeated where asked for twice, and none where none is asked for."""
    model, prompt = _model("llama_gqa"), PROMPTS[2]
    whole = _logits(model, prompt)
    torch.testing.assert_close(_logits(model, prompt, [7, 2, 2]), whole[[7, 2, 2]], atol=1e-5, rtol=0)
    assert _logits(model, prompt, []).shape == (0, models.VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_argmax_equals_that_of_the_logits(family: str) -> None:
    """int64 ids of the largest logits."""
    model, ids = _model(family), torch.tensor(PROMPTS[-1])
    rows = torch.arange(len(ids))
    best = model.argmax(model.forward(ids, rows, DenseAttention(model.layers), rows=rows))
    assert best.dtype == torch.int64
    assert best.tolist() == _logits(model, PROMPTS[-1]).argmax(-1).tolist()


_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with everything": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn with a given magnitude": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("rope", _ROPES.values(), ids=_ROPES.keys())
def test_rope_variants_equal_transformers(rope: dict[str, Any]) -> None:
    """Each supported kind of RoPE gives transformers' logits, and other ones than the default kind gives."""
    folder, prompt = tiny("llama_gqa", rope_parameters=rope), PROMPTS[-1]
    ours = _logits(models.load(folder), prompt)
    torch.testing.assert_close(ours, _reference_logits(folder, prompt), atol=1e-4, rtol=0)
    assert (ours - _logits(_model("llama_gqa"), prompt)).abs().max() > 0.1


def test_rope_parameters_under_their_old_names() -> None:
    """`rope_theta` and `rope_scaling` with `type`, as configs held them before transformers 5, mean the same."""
    folder = tiny("llama_gqa", rope_parameters=_ROPES["linear"] | {"rope_theta": 500.0})
    new = json.loads((folder / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    from octavo.plugins.models.llama.config import LlamaConfig

    assert LlamaConfig.read(old) == LlamaConfig.read(new)


_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama_gqa", {"attention_bias": True}),
    ("llama_gqa", {"mlp_bias": True}),
    ("llama_gqa", {"head_dim": 24}),
    ("llama_mha", {"tie_word_embeddings": True}),
    ("llama_gqa", {"rms_norm_eps": 0.5}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"head_dim": 24}),
]


@pytest.mark.parametrize(("family", "overrides"), _VARIANTS, ids=str)
def test_config_variants_equal_transformers(family: str, overrides: dict[str, Any]) -> None:
    """Biases, head sizes, tied heads and windows by layer: fp32 logits agree within 1e-4, parameters are counted exactly."""
    folder, prompt = tiny(family, **overrides), PROMPTS[-1]
    model = models.load(folder)
    torch.testing.assert_close(_logits(model, prompt), _reference_logits(folder, prompt), atol=1e-4, rtol=0)
    count = sum(parameter.numel() for parameter in reference_model(folder).parameters())
    assert LLAMA.describe(json.loads((folder / "config.json").read_text())).num_parameters == count
    assert model.weight_bytes() == 4 * count


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_counts_parameters_as_transformers_does(family: str) -> None:
    """Tied weights once; what the loaded model holds is as much."""
    folder = tiny(family)
    shape = LLAMA.describe(json.loads((folder / "config.json").read_text()))
    count = sum(parameter.numel() for parameter in reference_model(folder).parameters())
    assert (shape.num_parameters, _model(family).weight_bytes()) == (count, 4 * count)
    assert [layer.window for layer in _model(family).layers] == list(shape.windows)


def test_bf16_weights_are_upcast_exactly() -> None:
    """A bf16 checkpoint loaded as fp32 gives the logits of transformers on the upcast weights; loaded as bf16 it stays so."""
    folder, prompt = tiny("llama_gqa", dtype=torch.bfloat16), PROMPTS[-1]
    torch.testing.assert_close(_logits(models.load(folder), prompt), _reference_logits(folder, prompt), atol=1e-4, rtol=0)
    native = models.load(folder, dtype=torch.bfloat16)
    assert (native.dtype, _logits(native, prompt).dtype) == (torch.bfloat16, torch.bfloat16)
    assert native.weight_bytes() * 2 == models.load(folder).weight_bytes()
    assert native.shape.dtype == "bfloat16"

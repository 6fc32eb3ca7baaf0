"""What a config.json says is read as the library reads it, without the library where it says everything."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from octavo.core.errors import ModelSourceError
from octavo.core.sources.catalogue import CATALOGUE, DEFAULT_MODEL
from octavo.plugins.models.transformers import TRANSFORMERS
from tests.hf_models import FAMILIES, config_of, loaded, source_of, tiny
from tests.models import WINDOW


def _config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a family's tiny model, entries of it overridden; None takes one out."""
    config = source_of(tiny(family)).config | overrides
    return {name: value for name, value in config.items() if value is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_loaded_model(family: str) -> None:
    """What is described before loading equals what the loaded model has, but for the number of parameters."""
    config = source_of(tiny(family)).config
    shape, model = TRANSFORMERS.describe(config), loaded(family)
    assert TRANSFORMERS.accepts(config) is None
    assert shape.num_parameters is None
    assert [(layer.num_heads, layer.num_kv_heads, layer.head_size_k, layer.head_size_v, layer.window) for layer in model.layers] == [
        (shape.num_heads, shape.num_kv_heads, shape.head_size_k, shape.head_size_v, window) for window in shape.windows
    ]
    assert (shape.architecture, shape.dtype) == (config["architectures"][0], "float32")
    library = config_of(family)
    assert (shape.vocab_size, shape.hidden_size) == (library.vocab_size, library.hidden_size)
    assert shape.max_position_embeddings == library.max_position_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_are_the_library_s_default(family: str) -> None:
    """Where config.json says nothing of them, and where it does."""
    silent = _config(family, tie_word_embeddings=None)
    library = type(config_of(family)).from_dict(silent)
    assert TRANSFORMERS.describe(silent).tied_embeddings == bool(library.tie_word_embeddings)
    assert TRANSFORMERS.describe(_config(family, tie_word_embeddings=True)).tied_embeddings
    assert not TRANSFORMERS.describe(_config(family, tie_word_embeddings=False)).tied_embeddings


def test_facts_name_what_kernels_must_know() -> None:
    """Windows, soft-cap and sinks become needs, so that a kernel without them is refused before anything is loaded."""
    needs = {
        family: TRANSFORMERS.describe(_config(family)).facts(device="cpu", dtype="float32", kv_dtype="float32").needs
        for family in ("gpt2", "phi3", "gemma2", "gpt_oss")
    }
    assert needs == {"gpt2": set(), "phi3": {"window"}, "gemma2": {"window", "softcap"}, "gpt_oss": {"window", "sinks"}}


def test_entries_that_a_config_leaves_out_are_the_library_s_defaults() -> None:
    """Old Gemma 2 and Mixtral folders name neither layer types nor all sizes."""
    gemma = TRANSFORMERS.describe(_config("gemma2", layer_types=None, head_dim=None, attn_logit_softcapping=None))
    assert (gemma.windows, gemma.head_size_k, gemma.softcap) == ((WINDOW, None), 256, 50.0)
    assert TRANSFORMERS.describe(_config("mixtral", num_key_value_heads=None)).num_kv_heads == 8


def test_rope_that_changes_with_the_longest_sequence_is_kept_to_the_original_context() -> None:
    """Beyond it the frequencies of all sequences of a batch would follow the longest."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    assert TRANSFORMERS.describe(_config("phi3", original_max_position_embeddings=64, rope_parameters=rope)).max_position_embeddings == 64


def test_the_default_model_is_described_without_torch() -> None:
    """Neither torch nor the library is imported for a family whose config.json says everything, nor to judge any model."""
    configs = [dict(CATALOGUE[DEFAULT_MODEL].config), _config("gpt2"), _config("opt"), _config("gpt_neox")]
    judged = [_config(family) for family in FAMILIES]
    code = f"""
import json, sys
from octavo.plugins.models.transformers import TRANSFORMERS
configs, judged = json.loads({json.dumps(json.dumps([configs, judged]))})
shapes = [TRANSFORMERS.describe(config) for config in configs]
assert [TRANSFORMERS.accepts(config) for config in judged] == [None] * len(judged)
assert shapes[0].num_kv_heads == 3 and shapes[0].windows == (None,) * 30 and shapes[0].head_size_k == 64, shapes[0]
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


_REFUSED = {
    "bloom": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
        "BloomForCausalLM adds biases to its attention scores by distance (ALiBi), which kernels do not know",
    ),
    "mamba": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "MambaForCausalLM carries a state from token to token beside the KV cache",
    ),
    "t5": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
        "T5ForConditionalGeneration is an encoder-decoder, not a decoder alone",
    ),
    "bart": (
        {"architectures": ["BartForConditionalGeneration"], "model_type": "bart"},
        "BartForConditionalGeneration is not a causal language model of text: its name ends in none of ForCausalLM, LMHeadModel",
    ),
    "llama 4": (
        {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"},
        "Llama4ForCausalLM attends within chunks of the context, which kernels do not know",
    ),
    "cross attention": (
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "add_cross_attention": True},
        "GPT2LMHeadModel with add_cross_attention attends to an encoder",
    ),
    "quantised": (
        {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config (mxfp4) is not supported: the weights must be plain",
    ),
    "hybrid": (
        {"architectures": ["NewForCausalLM"], "model_type": "new", "layer_types": ["full_attention", "linear_attention"]},
        "NewForCausalLM has layers of type linear_attention; supported are full_attention and sliding_attention",
    ),
    "nameless": ({}, "config.json lacks model_type"),
}


@pytest.mark.parametrize(("config", "reason"), _REFUSED.values(), ids=_REFUSED)
def test_refusals_give_name_and_reason(config: dict[str, Any], reason: str) -> None:
    """`accepts` and `describe` say the same."""
    assert TRANSFORMERS.accepts(config) == reason
    with pytest.raises(ModelSourceError) as caught:
        TRANSFORMERS.describe(config)
    assert str(caught.value) == f"model plugin 'transformers' cannot run this model: {reason}"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "unheard_of"}, "does not know model_type 'unheard_of'; a newer one may"),
        ({"architectures": ["MambaLMHeadModel"], "model_type": "gpt_bigcode", "n_head": "four"}, "transformers refuses this config.json"),
        ({"architectures": ["BlenderbotForCausalLM"], "model_type": "vit"}, "lacks vocab_size, max_position_embeddings"),
    ],
)
def test_what_only_the_library_can_tell_is_refused_when_described(config: dict[str, Any], reason: str) -> None:
    """An unknown type, entries that it cannot use, entries that it does not have."""
    with pytest.raises(ModelSourceError, match="model plugin 'transformers' cannot run this model: ") as caught:
        TRANSFORMERS.describe(config)
    assert reason in str(caught.value)

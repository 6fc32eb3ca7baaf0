"""What the llama plugin accepts, how it fills in what a config.json leaves out, and that it refuses by name what it can't compute."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import transformers

from octavo.core.errors import ModelSourceError
from octavo.plugins.models.llama import LLAMA, octavo_models
from octavo.plugins.models.llama.config import LlamaConfig

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not among LlamaForCausalLM, MistralForCausalLM,"),
        ({"architectures": None, "model_type": "bloom"}, "architecture 'bloom' is not among"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq) is not supported"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"vocab_size": "100"}, "vocab_size = '100' in config.json is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type = 'dynamic' is not supported, only default, linear, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of rope_type 'linear' lack factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' lack high_freq_factor, low_freq_factor"),
        ({"rope_parameters": {"mrope_section": [1, 1]}}, "rope_parameters of rope_type 'default' with mrope_section are not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "with full_attention are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "layer_types": ["full_attention"] * 2},
            "layer_types is not supported for MistralForCausalLM",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": 0},
            "sliding_window = 0 in config.json is not a positive integer",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "layer_types": ["full_attention"]}, "for each of the 2 layers"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4, "layer_types": ["chunked_attention"] * 2},
            "layer_types must name full_attention or sliding_attention",
        ),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(entries: dict[str, Any], reason: str) -> None:
    """`accepts` gives the reason, `describe` and `build` raise it."""
    config = _LLAMA | entries
    assert reason in (LLAMA.accepts(config) or "")
    with pytest.raises(ModelSourceError, match="model plugin 'llama' cannot run this model: "):
        LLAMA.describe(config)


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 2, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}),
        ("Mistral", {"num_attention_heads": 16}),
        ("Mistral", {"num_attention_heads": 16, "sliding_window": None}),
        ("Qwen2", {"num_attention_heads": 32}),
        ("Qwen2", {"num_attention_heads": 32, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen2", {"num_attention_heads": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
        ("Qwen3", {"num_attention_heads": 32, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9}),
    ],
    ids=str,
)
def test_entries_left_out_mean_what_transformers_takes_for_them(family: str, entries: dict[str, Any]) -> None:
    """Sizes, positions, windows, eps and RoPE equal those of transformers' config made of the same entries."""
    given = _LLAMA | {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()} | entries
    theirs = getattr(transformers, f"{family}Config")(**given)
    ours = LlamaConfig.read(given)
    shape = ours.shape
    assert (shape.num_kv_heads, shape.max_position_embeddings) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert shape.head_size_k == shape.head_size_v == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.rms_norm_eps, ours.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rope == {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if family == "Mistral" else "full_attention"] * 2
    windows = tuple(getattr(theirs, "sliding_window", None) if kind == "sliding_attention" else None for kind in types)
    assert shape.windows == windows


def test_the_model_type_stands_in_for_a_missing_architecture() -> None:
    """A config without `architectures` is read by its `model_type`."""
    assert LLAMA.describe(_LLAMA | {"architectures": None}).architecture == "LlamaForCausalLM"


def test_listing_and_describing_import_no_torch() -> None:
    """`octavo plugins` and the compatibility check stay fast."""
    code = (
        "import sys; from octavo.plugins.models.llama import LLAMA; from octavo.plugins.ops.torch_ops import octavo_ops; octavo_ops();"
        f"LLAMA.describe({_LLAMA!r}); print(sorted({{'torch', 'numpy', 'transformers', 'safetensors'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "[]"


def test_the_hook_gives_the_descriptor() -> None:
    """One model plugin, named llama."""
    assert [plugin.name for plugin in octavo_models()] == ["llama"]

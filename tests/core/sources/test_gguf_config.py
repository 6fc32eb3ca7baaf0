"""Figures of a GGUF file that transformers skips come into the config, or the file is refused by the name of what would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ModelSourceError
from octavo.core.sources.gguf_config import complete_config
from octavo.core.sources.gguf_header import GGUFHeader

GEMMA2 = {"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def header(architecture: str, figures: dict[str, Any], factors: dict[str, list[float]] | None = None) -> GGUFHeader:
    return GGUFHeader(
        path=Path("x.gguf"),
        architecture=architecture,
        figures=figures,
        rope_factors=factors or {},
        num_weights=0,
        dtype="float32",
        quantisation="F32",
        end_ids=(),
        bos_id=None,
        pad_id=None,
        unk_id=None,
        tokenizer_kind=None,
        pre_tokenizer=None,
    )


def refusal(config: Any, *args: Any) -> str:
    with pytest.raises(ModelSourceError) as caught:
        complete_config(config, header(*args))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "scalar"),
    [
        ({"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256}, 256),  # 2B
        ({"num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256}, 256),  # 9B
        ({"num_hidden_layers": 46, "hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128}, 144),  # 27B
    ],
)
def test_published_gemma2_has_its_scale(config: dict[str, int], scalar: int) -> None:
    """query_pre_attn_scalar of the three models, as in their own config.json; the file does not say it."""
    from transformers import Gemma2Config

    made = Gemma2Config(**config)
    complete_config(made, header("gemma2", GEMMA2))
    assert made.query_pre_attn_scalar == scalar


def test_gemma3_27b_has_its_scale() -> None:
    """168, hidden size / heads, where the others have the size of a head."""
    from transformers import Gemma3TextConfig

    made = Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, head_dim=128)
    complete_config(made, header("gemma3", {"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}))
    assert made.query_pre_attn_scalar == 168
    assert made.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert made.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_gemma2_of_unknown_scale_is_refused() -> None:
    """Neither said nor to be told from the number of layers."""
    from transformers import Gemma2Config

    config = Gemma2Config(num_hidden_layers=30, hidden_size=4608, num_attention_heads=32, head_dim=128)
    text = refusal(config, "gemma2", GEMMA2)
    assert "x.gguf (GGUF, architecture 'gemma2') cannot be converted: the file does not say gemma2.attention.scale" in text
    assert "may be 128 (the size of a head) or 144 (hidden size / heads)" in text


@pytest.mark.parametrize("missing", GEMMA2)
def test_a_gemma2_without_its_figures_is_refused(missing: str) -> None:
    """Files of the first days lack them."""
    from transformers import Gemma2Config

    figures = {key: value for key, value in GEMMA2.items() if key != missing}
    assert f"the file does not say gemma2.{missing}. Fetch a newer conversion" in refusal(Gemma2Config(), "gemma2", figures)


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"attention.scale": 0.5}, "llama.attention.scale = 0.5 would be lost, and the answers wrong."),
        ({"logit_scale": 0.25}, "llama.logit_scale = 0.25 would be lost"),
        ({"attention.causal": False}, "llama.attention.causal = False would be lost"),
        ({"attention.sliding_window": 512}, "llama.attention.sliding_window = 512 would be lost"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type = 'longrope' would be lost"),
        ({"rope.scaling.type": "linear"}, "RoPE is stretched (linear), but the file does not say llama.rope.scaling.factor."),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "does not say llama.rope.scaling.original_context_length."),
        ({"attention.key_length": 64, "rope.dimension_count": 32}, "RoPE turns 32 of a head's 64 dimensions, which would be lost."),
        ({"marsian": 1}, "llama.marsian = 1 would be lost"),
    ],
)
def test_what_has_no_place_is_refused(figures: dict[str, Any], text: str) -> None:
    """By its key, with the way out."""
    from transformers import LlamaConfig

    message = refusal(LlamaConfig(), "llama", figures)
    assert text in message and message.endswith("Take the model's original folder, with safetensors.")


def test_neutral_figures_are_fine() -> None:
    """What changes nothing is no reason to refuse."""
    from transformers import LlamaConfig

    config = LlamaConfig(bos_token_id=None, eos_token_id=None)
    before = config.to_dict()
    complete_config(config, header("llama", {"attention.causal": True, "rope.scaling.type": "none", "expert_count": 0}))
    assert config.to_dict() == before


def test_ids_are_the_file_s() -> None:
    """A config class's own are another model's: Phi-3's padding, 32000, would lie outside of a small vocabulary."""
    from transformers import Phi3Config

    config = Phi3Config(vocab_size=384)
    complete_config(config, replace(header("phi3", {}), bos_id=5, end_ids=(6, 7)))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5, [6, 7], None)


def test_the_base_of_rope_is_the_file_s() -> None:
    """Of StarCoder 2 transformers does not read it, and would take 10,000."""
    from transformers import Starcoder2Config

    config = Starcoder2Config()
    complete_config(config, header("starcoder2", {"rope.freq_base": 999999.4375}))
    assert config.rope_parameters["rope_theta"] == 999999.4375


def test_yarn_comes_through() -> None:
    """As Qwen's long versions have it."""
    from transformers import Qwen2Config

    config = Qwen2Config(rope_theta=1e6)
    figures = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768}
    complete_config(config, header("qwen2", figures))
    wanted = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config.rope_parameters == wanted


def test_llama3_frequencies_come_through() -> None:
    """Its files carry divisors instead of the five numbers they came from; those give the same frequencies in transformers."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    original = LlamaConfig(hidden_size=2048, num_attention_heads=32, rope_parameters=dict(rope))
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](original, torch.device("cpu"))
    plain = 5e5 ** -(torch.arange(0, 64, 2) / 64)
    divisors = (plain / stretched).tolist()
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, rope_theta=5e5)
    complete_config(config, header("llama", {"rope.freq_base": 5e5, "rope.dimension_count": 64}, {"rope_freqs": divisors}))
    assert config.rope_parameters == pytest.approx({k: v for k, v in rope.items() if k != "rope_type"} | {"rope_type": "llama3"})

    divisors[20] *= 1.1
    text = refusal(LlamaConfig(hidden_size=2048, num_attention_heads=32), "llama", {"rope.freq_base": 5e5}, {"rope_freqs": divisors})
    assert "its rope_freqs.weight are not those of Llama 3" in text
    text = refusal(LlamaConfig(), "qwen2", {}, {"rope_freqs": divisors})
    assert "its rope_freqs (factors of RoPE's frequencies) would be lost" in text

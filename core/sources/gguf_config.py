"""What transformers leaves out of a config that it makes of a GGUF file's metadata: taken over here, or refused by name.

Its reader knows a handful of keys an architecture and silently skips the others, whose places then keep the library's defaults: soft-caps,
the scale of attention, windows, the stretching of RoPE, the width of experts. A model converted so runs, and answers wrongly. So every
key must be one that the library reads, that changes nothing, or that is taken over here. What a key means is what llama.cpp makes of it
(src/llama-model.cpp, convert_hf_to_gguf.py); the names are those of the `gguf` package's constants.

Must not know: how tensors are read, the cache. Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from octavo.core.sources.gguf_header import GGUFHeader

WAY_OUT = "Take the model's original folder, with safetensors."

# Read by transformers, or of no effect on what is computed.
_READ = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
        *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")),
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
        *("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
        *("expert_count", "expert_used_count"),
    }
)
# Without effect where they have this value.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.type": "none",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # of every Llama 3.1 to 3.3
# Layer counts of the published models, by which llama.cpp tells how attention is scaled.
_BY_HEAD_SIZE = {"gemma2": (26, 42), "gemma3": (18, 26, 34, 48)}
_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}


def complete_config(config: Any, header: GGUFHeader) -> None:
    """Put into `config`, which transformers made of the file's metadata, what it left out.

    Raises `ModelSourceError` naming the key where the file says something that has no place, or lacks a figure that decides.
    """
    figures = header.figures
    taken: set[str] = set()
    if figures.get("expert_count") and not hasattr(config, "num_experts_per_tok"):
        raise header.refusal(
            f"it has {figures['expert_count']} experts (as Mixtral), and transformers reads this architecture only without. {WAY_OUT}"
        )
    # The class's own ids are those of another model, and may lie outside of this one's vocabulary.
    config.bos_token_id, config.pad_token_id, config.eos_token_id = header.bos_id, header.pad_id, header.eos_token_id
    if "context_length" in figures:
        config.max_position_embeddings = figures["context_length"]  # GPT-2's was put where its model does not look
    if "attention.key_length" in figures and hasattr(config, "head_dim"):
        config.head_dim = figures["attention.key_length"]
    for key, name in _PLACES.get(header.architecture, {}).items():
        if key in figures:
            setattr(config, name, figures[key] or None)  # Phi-4 has a window of 0, which is none
            taken.add(key)
    if header.architecture in _BY_HEAD_SIZE:
        _complete_gemma(config, header, taken)
    _complete_rope(config, header, taken)
    for key, value in figures.items():
        if key not in _READ and key not in taken and not (key in _NEUTRAL and value == _NEUTRAL[key]):
            raise header.refusal(f"{header.architecture}.{key} = {value!r} would be lost, and the answers wrong. {WAY_OUT}")


_PLACES = {
    "gpt2": {"feed_forward_length": "n_inner"},
    "phi3": {"attention.sliding_window": "sliding_window", "rope.scaling.original_context_length": "original_max_position_embeddings"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"},
}


def _complete_gemma(config: Any, header: GGUFHeader, taken: set[str]) -> None:
    """The scale of attention and which layers have a window. Gemma 2 must say its soft-caps, too: files of the first days don't."""
    needed = _PLACES[header.architecture] if header.architecture == "gemma2" else ("attention.sliding_window",)
    missing = [f"{header.architecture}.{key}" for key in needed if key not in header.figures]
    if missing:
        raise header.refusal(f"the file does not say {', '.join(missing)}. Fetch a newer conversion, or the original folder.")
    config.query_pre_attn_scalar = _gemma_scalar(config, header)
    pattern = header.figures.get("attention.sliding_window_pattern")
    if pattern is not None:  # every so manyth layer sees all, or a list that says which layers don't
        layers = range(config.num_hidden_layers)
        windowed = pattern if isinstance(pattern, Sequence) else [(layer + 1) % pattern != 0 for layer in layers]
        config.layer_types = ["sliding_attention" if windowed[layer] else "full_attention" for layer in layers]
    taken |= {"attention.scale", "attention.sliding_window_pattern"}


def _gemma_scalar(config: Any, header: GGUFHeader) -> int:
    """What scores are divided by the root of: the size of a head, but hidden size / heads in the 27B models."""
    by_hidden_size = config.hidden_size // config.num_attention_heads
    scale = header.figures.get("attention.scale")
    if scale is not None:
        return round(1 / float(scale) ** 2)
    if config.num_hidden_layers == _BY_HIDDEN_SIZE[header.architecture]:
        return int(by_hidden_size)
    if config.num_hidden_layers in _BY_HEAD_SIZE[header.architecture] or config.head_dim == by_hidden_size:
        return int(config.head_dim)
    raise header.refusal(
        f"the file does not say {header.architecture}.attention.scale, and with {config.num_hidden_layers} layers it is none of the known: "
        f"query_pre_attn_scalar may be {config.head_dim} (the size of a head) or {by_hidden_size} (hidden size / heads). {WAY_OUT}"
    )


def _complete_rope(config: Any, header: GGUFHeader, taken: set[str]) -> None:
    figures, factors = header.figures, header.rope_factors
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # no rotary embedding; a key about one will be refused
        return
    rope = parameters.get("full_attention", parameters)  # Gemma 3 has two
    if "rope.freq_base" in figures:
        rope["rope_theta"] = figures["rope.freq_base"]
    if "rope.freq_base_swa" in figures and "sliding_attention" in parameters:
        parameters["sliding_attention"]["rope_theta"] = figures["rope.freq_base_swa"]
        taken.add("rope.freq_base_swa")
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = figures.get("rope.dimension_count", head_size)
    if rotated != head_size:
        if header.architecture != "phi3":
            raise header.refusal(f"RoPE turns {rotated} of a head's {head_size} dimensions, which would be lost. {WAY_OUT}")
        rope["partial_rotary_factor"] = rotated / head_size
    kind = figures.get("rope.scaling.type")
    if kind in ("linear", "yarn"):
        needed = {"factor": "rope.scaling.factor"}
        if kind == "yarn":
            needed["original_max_position_embeddings"] = "rope.scaling.original_context_length"
        missing = [f"{header.architecture}.{key}" for key in needed.values() if key not in figures]
        if missing:
            raise header.refusal(f"RoPE is stretched ({kind}), but the file does not say {', '.join(missing)}. {WAY_OUT}")
        rope |= {"rope_type": kind, **{name: figures[key] for name, key in needed.items()}}
        taken |= {"rope.scaling.type", *needed.values()}
    if header.architecture == "phi3" and factors.keys() == {"rope_factors_long", "rope_factors_short"}:
        rope |= {"rope_type": "longrope", "long_factor": factors["rope_factors_long"], "short_factor": factors["rope_factors_short"]}
        if "rope.scaling.attn_factor" in figures:
            rope["attention_factor"] = figures["rope.scaling.attn_factor"]
        taken |= {"rope.scaling.attn_factor", "rope.scaling.type"}
    elif header.architecture == "llama" and factors.keys() == {"rope_freqs"}:
        stretch = _LLAMA3 | {"factor": max(factors["rope_freqs"])}
        if not _same(factors["rope_freqs"], _llama3_divisors(len(factors["rope_freqs"]), rope["rope_theta"], stretch)):
            raise header.refusal(f"its rope_freqs.weight are not those of Llama 3, and have no other place. {WAY_OUT}")
        rope |= {"rope_type": "llama3", **stretch}
    elif factors:
        raise header.refusal(f"its {', '.join(sorted(factors))} (factors of RoPE's frequencies) would be lost. {WAY_OUT}")


def _llama3_divisors(count: int, theta: float, stretch: dict[str, Any]) -> list[float]:
    """By what each frequency is divided (the `llama3` type of RoPE in transformers, and llama.cpp's converter)."""
    low, high, original, factor = (stretch[name] for name in (*_LLAMA3, "factor"))
    turns = [original / (2 * math.pi * theta ** (i / count)) for i in range(count)]  # within the original context
    kept = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
    return [1 / ((1 - share) / factor + share) for share in kept]


def _same(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(ours, theirs, strict=True))

"""Tiny random models of the families that only the `transformers` plugin runs, made so that a wrong attention shows: see `tests.models`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from octavo.core.model import Model
from octavo.plugins.models.transformers import TransformersOptions, build
from tests.models import PROMPTS as ALL_PROMPTS, VOCAB, WINDOW, save_scaled

PROMPTS = tuple(prompt for prompt in ALL_PROMPTS if len(prompt) in (5, 16, 33))
"""Shorter than a window, on a multiple of block sizes 4 and 16, longer than a window."""

NEW_TOKENS = 16

_IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_COMMON: dict[str, Any] = _IDS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GPT: dict[str, Any] = _IDS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_EXPERTS: dict[str, Any] = _COMMON | {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# family -> (class of the config, its entries, seed). The seeds are chosen so that no step is near a tie and every fault shows.
_FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt2": ("GPT2Config", _GPT, 1),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 8}, 3),
    "opt": ("OPTConfig", _IDS | {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}, 2),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}, 3),
    "phi3": ("Phi3Config", _COMMON | {"sliding_window": WINDOW}, 2),
    "gemma2": (
        "Gemma2Config",
        _COMMON
        | _ALTERNATING
        | {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
        2,
    ),
    "gemma3": ("Gemma3TextConfig", _COMMON | _ALTERNATING | {"head_dim": 16, "query_pre_attn_scalar": 24}, 3),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS | {"head_dim": 16, "num_experts": 4}, 1),
    "mixtral": ("MixtralConfig", _EXPERTS | {"num_local_experts": 4}, 1),
    "granite": (
        "GraniteConfig",
        _COMMON | {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
        1,
    ),
    "cohere": ("CohereConfig", _COMMON | {"logit_scale": 0.25}, 1),
    "olmo2": ("Olmo2Config", _COMMON, 1),
    "deepseek_v3": (
        "DeepseekV3Config",
        _EXPERTS
        | {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
        1,
    ),
    "gpt_oss": (
        "GptOssConfig",
        _EXPERTS
        | _ALTERNATING
        | {"head_dim": 16, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        1,
    ),
}
FAMILIES = tuple(_FAMILIES)


def config_of(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """Config of this family's tiny model, entries of it overridden."""
    config_class, entries, _ = _FAMILIES[family]
    return getattr(transformers, config_class)(**(entries | overrides))


@functools.cache
def tiny(family: str) -> Path:
    """Folder of the tiny model of this family (one of FAMILIES), made once a session, without a tokenizer."""
    return save_scaled(config_of(family), family, seed=_FAMILIES[family][2])


def source_of(folder: Path) -> Any:
    """As much of a ModelSource as `build` needs."""
    return SimpleNamespace(path=folder, config=json.loads((folder / "config.json").read_text()))


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """The folder's model as the transformers plugin builds it, on the CPU."""
    unused: Any = None
    return build(source_of(folder), TransformersOptions(), unused, dtype=dtype, device=torch.device("cpu"))


@functools.cache
def loaded(family: str) -> Model:
    """The tiny model of a family, loaded once a session."""
    return load(tiny(family))

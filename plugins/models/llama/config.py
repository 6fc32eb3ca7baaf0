"""Reads the config.json of the families that the llama plugin runs, as transformers 5 reads it.

What changes the function and isn't supported here is refused by its name, never ignored. Must not know: torch, weights, kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.descriptors import ModelShape


class Unsupported(Exception):
    """This config is not one that the plugin runs; the message says which entry and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture fixes, and the values of entries that its config.json leaves out. The defaults are Llama's."""

    architecture: str
    qkv_bias: bool | None = None  # None: the config's attention_bias says
    out_bias: bool | None = None
    mlp_bias: bool | None = None  # None: the config's mlp_bias says
    qk_norm: bool = False
    num_kv_heads: int | None = None  # None: as many as query heads
    head_size: int | None = None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048


_FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(
        architecture="MistralForCausalLM", qkv_bias=False, out_bias=False, mlp_bias=False, num_kv_heads=8, max_position_embeddings=131072
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, out_bias=False, mlp_bias=False, num_kv_heads=32, max_position_embeddings=32768
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", mlp_bias=False, qk_norm=True, num_kv_heads=32, head_size=128, max_position_embeddings=32768
    ),
}
ARCHITECTURES = tuple(family.architecture for family in _FAMILIES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """All that the model is built from."""

    shape: ModelShape
    intermediate_size: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    tied: bool  # the LM head is the embedding
    rope: Mapping[str, Any]  # rope_type, rope_theta and the parameters of that type

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a parsed config.json. Raises Unsupported."""
        family = _family(config)
        _refuse_foreign_entries(config)
        hidden, heads = (_size(config, "hidden_size"), _size(config, "num_attention_heads"))
        kv_heads = _size(config, "num_key_value_heads", family.num_kv_heads or heads)
        head = _size(config, "head_dim", family.head_size or hidden // heads)
        if heads % kv_heads:
            raise Unsupported(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
        layers, inner, vocab = (_size(config, key) for key in ("num_hidden_layers", "intermediate_size", "vocab_size"))
        positions = _size(config, "max_position_embeddings", family.max_position_embeddings)
        attention_bias = bool(config.get("attention_bias", False))
        qkv_bias, out_bias = (attention_bias if bias is None else bias for bias in (family.qkv_bias, family.out_bias))
        mlp_bias = bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias
        tied = bool(config.get("tie_word_embeddings", False))

        q, kv = heads * head, kv_heads * head
        attention = (q + 2 * kv) * (hidden + qkv_bias) + hidden * (q + out_bias) + 2 * head * family.qk_norm
        mlp = 2 * inner * (hidden + mlp_bias) + hidden * (inner + mlp_bias)
        return cls(
            shape=ModelShape(
                architecture=family.architecture,
                num_layers=layers,
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_size_k=head,
                head_size_v=head,
                windows=_windows(config, family, layers),
                vocab_size=vocab,
                max_position_embeddings=positions,
                num_parameters=vocab * hidden * (1 if tied else 2) + layers * (attention + mlp + 2 * hidden) + hidden,
                tied_embeddings=tied,
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            ),
            intermediate_size=inner,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            mlp_bias=mlp_bias,
            qk_norm=family.qk_norm,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=tied,
            rope=_rope(config, positions),
        )


def _family(config: Mapping[str, Any]) -> Family:
    named = (config.get("architectures") or [None])[0]
    for model_type, family in _FAMILIES.items():
        if named == family.architecture or (named is None and config.get("model_type") == model_type):
            return family
    raise Unsupported(f"architecture {named or config.get('model_type')!r} is not among {', '.join(ARCHITECTURES)}")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise Unsupported(
            f"{key} = {value!r} in config.json is not a positive integer" if value is not None else f"config.json lacks {key}"
        )
    return value


def _refuse_foreign_entries(config: Mapping[str, Any]) -> None:
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise Unsupported(f"hidden_act = {act!r} is not supported, only 'silu'")
    if (degree := config.get("pretraining_tp") or 1) != 1:
        raise Unsupported(f"pretraining_tp = {degree} is not supported, only 1")
    if quantization := config.get("quantization_config"):
        raise Unsupported(
            f"quantization_config ({quantization.get('quant_method', 'unnamed method')}) is not supported: the weights must be plain"
        )


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Llama has none whatever the config says; Mistral's holds for all layers; Qwen's for those of a type."""
    if family.architecture == "LlamaForCausalLM":
        return (None,) * layers
    # An absent entry means the default of transformers, null means none.
    window = None if config.get("sliding_window", 4096) is None else _size(config, "sliding_window", 4096)
    types = config.get("layer_types")
    if family.architecture == "MistralForCausalLM":
        if types is not None:
            raise Unsupported("layer_types is not supported for MistralForCausalLM: its window holds for all layers")
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        window = None
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(layers)]
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if len(types) != layers or not known.keys() >= set(types):
        raise Unsupported(f"layer_types must name full_attention or sliding_attention for each of the {layers} layers, not {types}")
    return tuple(known[layer_type] for layer_type in types)


_CONTEXT = "original_max_position_embeddings"
_ROPE_REQUIRED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _CONTEXT},
    "yarn": {"factor", _CONTEXT},
}
_ROPE_OPTIONAL = {"yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}}


def _rope(config: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """The parameters of RoPE from `rope_parameters`, or from `rope_scaling` and `rope_theta` as they were called before transformers 5."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope["rope_type"] = kind = rope.get("rope_type") or rope.get("type") or "default"
    rope.pop("type", None)
    rope.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    if kind not in _ROPE_REQUIRED:
        raise Unsupported(f"rope_type = {kind!r} is not supported, only {', '.join(_ROPE_REQUIRED)}")
    part = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise Unsupported(f"partial_rotary_factor = {part} is not supported, only 1.0")
    if _CONTEXT in _ROPE_REQUIRED[kind]:
        rope[_CONTEXT] = config.get(_CONTEXT) or rope.get(_CONTEXT) or max_position_embeddings
    if kind == "yarn" and not rope.get("factor"):
        rope["factor"] = max_position_embeddings / rope[_CONTEXT]
    given = rope.keys() - {"rope_type", "rope_theta"}
    if missing := _ROPE_REQUIRED[kind] - given:
        raise Unsupported(f"rope_parameters of rope_type {kind!r} lack {', '.join(sorted(missing))}")
    if unknown := given - _ROPE_REQUIRED[kind] - _ROPE_OPTIONAL.get(kind, set()):
        raise Unsupported(f"rope_parameters of rope_type {kind!r} with {', '.join(sorted(unknown))} are not supported")
    return rope

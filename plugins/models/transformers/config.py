"""Reads a config.json: what speaks against running the model, and its sizes.

The list of refusals here is a courtesy, so that the common ones come before a download and with a plain reason; whether a model
really runs is found by `probe` once it is loaded. Must not know: kernels, how models are loaded. Must not import torch at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.descriptors import ModelShape


class Unsupported(Exception):
    """This model is not one that the plugin runs; the message says what about it and why."""


_ALIBI = "adds biases to its attention scores by distance (ALiBi), which kernels do not know"
_STATE = "carries a state from token to token beside the KV cache"
_OWN = "computes its attention itself and does not hand it to the library's AttentionInterface"
_REFUSED = {
    **dict.fromkeys(("bloom", "mpt", "falcon"), _ALIBI),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2"), _STATE),
    **dict.fromkeys(("falcon_h1", "granitemoehybrid", "nemotron_h", "minimax", "lfm2", "lfm2_moe", "qwen3_next"), _STATE),
    **dict.fromkeys(("gpt_neo", "openai-gpt", "ctrl", "xlnet", "xglm"), _OWN),
    "llama4_text": "attends within chunks of the context, which kernels do not know",
}
_SINKS = {"gpt_oss", "flint", "granite_swa", "granitemoe_swa"}
_CAUSAL = ("ForCausalLM", "LMHeadModel")

# Families whose config.json always holds all that is read here (under these names), so that the library need not be asked.
_GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_COMPLETE: dict[str, Mapping[str, str]] = {"llama": {}, "opt": {}, "gpt_neox": {}, "gpt2": _GPT, "gptj": _GPT}
_TIED = ("opt", "gpt2")  # of those above, whose embeddings are tied where config.json says nothing
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


def refuse(config: Mapping[str, Any]) -> None:
    """Raise Unsupported with the architecture's name and a reason, if config.json alone shows that the model cannot run."""
    architecture, model_type = _architecture(config), config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise Unsupported(f"{architecture} is an encoder-decoder, not a decoder alone")
    if not isinstance(model_type, str):
        raise Unsupported("config.json lacks model_type")
    if reason := _REFUSED.get(model_type):
        raise Unsupported(f"{architecture} {reason}")
    if not architecture.endswith(_CAUSAL):
        raise Unsupported(f"{architecture} is not a causal language model of text: its name ends in none of {', '.join(_CAUSAL)}")
    if config.get("add_cross_attention"):
        raise Unsupported(f"{architecture} with add_cross_attention attends to an encoder")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed method")
        raise Unsupported(f"quantization_config ({method}) is not supported: the weights must be plain")
    _check_layer_types(architecture, config.get("layer_types"))


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Sizes of the model, without its number of parameters. Raises Unsupported."""
    refuse(config)
    get = _reader(config)
    missing = [name for name in _REQUIRED if not isinstance(get(name), int)]
    if missing:
        raise Unsupported(f"config.json of {_architecture(config)} lacks {', '.join(missing)}")
    layers, hidden, heads, vocab, _ = (get(name) for name in _REQUIRED)
    head = get("qk_head_dim") or get("head_dim") or hidden // heads  # the first: multi-head latent attention (DeepSeek)
    return ModelShape(
        architecture=_architecture(config),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=1 if get("multi_query") else get("num_key_value_heads") or heads,
        head_size_k=head,
        head_size_v=(get("v_head_dim") or head) if get("qk_head_dim") else head,
        windows=_windows(_architecture(config), get, layers),
        softcap=get("attn_logit_softcapping"),
        sinks=config["model_type"] in _SINKS,
        vocab_size=vocab,
        max_position_embeddings=_positions(get),
        num_parameters=None,
        tied_embeddings=_tied(config["model_type"], get),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    """The name of the model's class; config.json may lack it where it has a model_type."""
    named = config.get("architectures")
    return str(named[0]) if named else f"{config.get('model_type')}ForCausalLM"


def _reader(config: Mapping[str, Any]) -> Callable[[str], Any]:
    """Look entries up by the library's names: in config.json where it is complete, else in the library's config of this type."""
    names = _COMPLETE.get(config["model_type"])
    if names is not None and all(names.get(name, name) in config for name in _REQUIRED):
        plain = names
        return lambda name: config.get(plain.get(name, name))
    from transformers import CONFIG_MAPPING, __version__ as version

    if config["model_type"] not in CONFIG_MAPPING:
        raise Unsupported(f"transformers {version} does not know model_type {config['model_type']!r}; a newer one may")
    try:
        completed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    except Exception as error:  # each config class checks its entries in its own way
        raise Unsupported(f"transformers refuses this config.json of {_architecture(config)}: {error}") from error

    def get(name: str) -> Any:
        try:
            return getattr(completed, name, None)
        except Exception as error:  # where layers differ, some configs refuse to name one size for all
            raise Unsupported(f"{_architecture(config)} has no single {name}: {error}") from error

    return get


def _tied(model_type: str, get: Callable[[str], Any]) -> bool:
    said = get("tie_word_embeddings")
    return model_type in _TIED if said is None else bool(said)


def _check_layer_types(architecture: str, types: Any) -> None:
    for layer_type in types or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            raise Unsupported(f"{architecture} has layers of type {layer_type}; supported are full_attention and sliding_attention")


def _windows(architecture: str, get: Callable[[str], Any], layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by its type where layers have types, else the same for all."""
    types, window = get("layer_types"), get("sliding_window")
    _check_layer_types(architecture, types)
    if get("model_type") == "llama":  # has none, whatever its config says
        window = None
    return tuple(window if types is None or types[index] == "sliding_attention" else None for index in range(layers))


def _positions(get: Callable[[str], Any]) -> int:
    """Positions that the model can be given.

    With `dynamic` and `longrope` RoPE the library changes the frequencies of every sequence of a batch once the longest has more
    tokens than the original context; up to there they are constant, and so is what is cached.
    """
    longest = int(get("max_position_embeddings"))
    rope = get("rope_parameters") or get("rope_scaling") or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, Mapping)]
    for part in by_layer_type or [rope]:
        if (part.get("rope_type") or part.get("type")) in ("dynamic", "longrope"):
            longest = min(longest, part.get("original_max_position_embeddings") or get("original_max_position_embeddings") or longest)
    return longest

"""Tiny random models on which a wrong attention shows, and what transformers generates with them.

With the usual initialisation a tiny model that ignores its whole context still gives half of the right tokens. Here the matrices are
scaled up eight times, biases and norms are random too, and `test_models.py` asserts that the two most likely tokens of every step
are more than 1e-3 apart and that each kind of wrong attention changes the tokens.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.model import Model
from octavo.core.sources import ModelSource
from octavo.plugins.models.llama import LlamaOptions, build
from octavo.plugins.ops.torch_ops.ops import TorchOps

VOCAB = 384
WINDOW = 8  # shorter than all PROMPTS but two

PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple((7 + 31 * length + 97 * i + 13 * i * i) % VOCAB for i in range(length)) for length in (1, 5, 11, 16, 17, 33)
)
"""The standard prompts. Their lengths: one token, around and on multiples of block sizes 4 and 16, longer than the window."""

NEW_TOKENS = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# family -> (class of the config, what differs from _COMMON, seed). The seeds are chosen so that the tests of this file's docstring hold.
_FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 4}, 1),
    "llama_gqa": ("LlamaConfig", {"tie_word_embeddings": True}, 3),
    "llama_mqa": ("LlamaConfig", {"num_key_value_heads": 1, "num_hidden_layers": 3}, 1),
    "qwen2": ("Qwen2Config", {}, 1),
    "qwen2_window": (
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        1,
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}, 3),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}, 1),
}
FAMILIES = tuple(_FAMILIES)


def tiny(family: str, *, seed: int | None = None, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Folder of a tiny model of this family (one of FAMILIES), made once a session; `overrides` are entries of its config.

    Its first 256 tokens are bytes, the others words that only decoding uses. No token ends a sequence: requests end at max_tokens.
    """
    return _tiny(family, _FAMILIES[family][2] if seed is None else seed, dtype, json.dumps(overrides, sort_keys=True))


@functools.cache
def _session() -> Path:
    """The folder of this process's models, removed when it exits."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _tiny(family: str, seed: int, dtype: torch.dtype, overrides: str) -> Path:
    config_class, differences, _ = _FAMILIES[family]
    return save_scaled(
        getattr(transformers, config_class)(**(_COMMON | differences | json.loads(overrides))), family, seed=seed, dtype=dtype
    )


@functools.cache
def looping() -> Path:
    """Folder of a tiny Llama that soon repeats itself, for drafts that are right: its matrices are scaled up less."""
    config = transformers.LlamaConfig(**(_COMMON | _FAMILIES["llama_gqa"][1]))
    return save_scaled(config, "looping", seed=3, scale=4)


def save_scaled(
    config: transformers.PretrainedConfig, name: str, *, seed: int, dtype: torch.dtype = torch.float32, scale: float = 8
) -> Path:
    """Folder of a random model of that config: matrices scaled up, biases and norms random; gone when the session ends."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.normal_(0, 0.5)
                elif parameter.dim() == 1:
                    parameter.normal_(1, 0.3)
                else:
                    parameter.mul_(scale)
    folder = _session() / f"{name}-{len(list(_session().iterdir()))}"
    model.to(dtype).save_pretrained(folder)
    _tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{token_id}" for token_id in range(len(alphabet), vocab_size)]  # Ġ is how a byte-level tokenizer writes a space
    tokens = {token: token_id for token_id, token in enumerate([*alphabet, *words][:vocab_size])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """The folder's model as the llama plugin builds it, on the CPU with torch ops."""
    config = json.loads((folder / "config.json").read_text())
    source = ModelSource(name=folder.name, path=folder, origin="a test", revision="local", config=config, generation_config={})
    return build(source, LlamaOptions(), TorchOps(), dtype=dtype, device=torch.device("cpu"))


@functools.cache
def reference_model(folder: Path) -> transformers.PreTrainedModel:
    """The folder's model in transformers, fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@functools.cache
def reference_tokens(folder: Path, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The tokens that transformers' greedy `generate` appends to each prompt, one prompt at a time, in fp32."""
    return tuple(_generate(folder, prompt, max_tokens)[0] for prompt in prompts)


@functools.cache
def reference_beams(folder: Path, prompt: tuple[int, ...], params: BeamSearchParams) -> list[tuple[list[int], float | None]]:
    """What transformers' `generate(num_beams=..., num_return_sequences=...)` gives for a prompt alone, in fp32, from the best.

    Ids with the EOS, and `sequences_scores`; no score where `beam_width` is 1, which is greedy search there. `params.max_tokens` is set.
    """
    ids, width = torch.tensor([prompt]), params.beam_width
    out = reference_model(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = out.sequences[:, len(prompt) :].tolist()
    if width == 1:
        return [(rows[0], None)]
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    return [(row[:length], score) for row, length, score in zip(rows, lengths, out.sequences_scores.tolist(), strict=True)]


@functools.cache
def reference_gap(folder: Path, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> float:
    """The smallest distance between the two largest logits over all steps of `reference_tokens`."""
    return min(_generate(folder, prompt, max_tokens)[1] for prompt in prompts)


@functools.cache
def _generate(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], float]:
    ids = torch.tensor([prompt])
    out = reference_model(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(out.logits).topk(2).values
    return tuple(out.sequences[0, len(prompt) :].tolist()), float((best[:, 0] - best[:, 1]).min())

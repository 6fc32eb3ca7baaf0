"""A GGUF file of a family that only transformers knows runs through the same door: converted once, then loaded as any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from octavo.core.sources import resolve
from tests.dense_attention import DenseAttention
from tests.hf_models import PROMPTS, config_of, load
from tests.models import VOCAB, reference_model, save_scaled


def _byte_level_vocabulary() -> list[str]:
    """VOCAB tokens: the 256 bytes as GPT-2 writes them, and merges of a letter with itself."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters + [2 * letter for letter in letters[: VOCAB - len(letters)]]


def _write(path: Path, architecture: gguf.MODEL_ARCH, folder: Path, numbers: dict[str, Any], transposed: tuple[str, ...]) -> None:
    """The model in `folder` as llama.cpp's converter writes it."""
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, name)
    for key, value in numbers.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{name}.{key}", value)
    tokens = _byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in tokens if len(token) == 2])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(architecture, numbers["block_count"])
    for ours, tensor in reference_model(folder).named_parameters():
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        weight = tensor.detach().numpy()
        writer.add_tensor(theirs, weight.T.copy() if ours.endswith(transposed) else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gpt2_from_gguf_gives_the_original_s_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32, with a vocabulary in the file: logits agree with the original model's."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    original = save_scaled(config_of("gpt2", n_positions=1024), "gpt2", seed=1)
    numbers: dict[str, Any] = {
        "block_count": 2,
        "context_length": 1024,
        "embedding_length": 64,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-5,
    }
    matrices = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    _write(tmp_path / "gpt2.gguf", gguf.MODEL_ARCH.GPT2, original, numbers, matrices)

    found = resolve(tmp_path / "gpt2.gguf")
    assert found.config["architectures"] == ["GPT2LMHeadModel"]
    model, ids = load(found.path), torch.tensor(PROMPTS[2])
    logits = model.logits(model.forward(ids, torch.arange(len(ids)), DenseAttention(model.layers), rows=torch.arange(len(ids))))
    with torch.no_grad():
        torch.testing.assert_close(logits, reference_model(original)(ids[None]).logits[0], atol=1e-3, rtol=1e-4)

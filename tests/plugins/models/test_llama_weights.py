"""Weights are read from safetensors, one file or several; what doesn't fit the config is named before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.errors import ModelSourceError
from octavo.plugins.models.llama.weights import Weights
from tests import models
from tests.dense_attention import DenseAttention
from tests.models import PROMPTS, reference_model, tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may spoil; its embeddings are tied."""
    return Path(shutil.copytree(tiny("llama_gqa"), tmp_path / "model"))


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _refusal(folder: Path) -> str:
    with pytest.raises(ModelSourceError) as refused:
        models.load(folder)
    return str(refused.value)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(folder: Path) -> None:
    """One error lists them all, with both shapes."""

    def spoil(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.zeros(63)

    _edit(folder, spoil)
    assert _refusal(folder) == (
        f"the weights in {folder} do not fit its config.json:\n"
        "  - missing: model.layers.1.mlp.up_proj.weight [96, 64]\n"
        "  - unexpected: model.layers.0.self_attn.q_proj.bias\n"
        "  - shape of model.norm.weight: [63], config.json asks for [64]"
    )


def test_a_long_list_is_cut(folder: Path) -> None:
    """Twenty lines, then a count."""
    _edit(folder, lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(25)}))
    assert _refusal(folder).endswith("\n  - and 5 more")


def test_leftovers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    """RoPE frequencies, and the head of a model whose head is its embedding."""
    extra = {"lm_head.weight": torch.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    _edit(folder, lambda tensors: tensors.update(extra))
    assert models.load(folder).weight_bytes() == models.load(tiny("llama_gqa")).weight_bytes()


def test_integer_weights_are_refused(folder: Path) -> None:
    """Quantised weights have another dtype: it is named."""
    _edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    assert "tensor model.norm.weight in" in _refusal(folder)
    assert "has dtype I8; supported are BF16, F16, F32, F64" in _refusal(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    """A truncated file is an error with its path, not a crash."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert f"cannot read weights from {file}: " in _refusal(folder)
    assert "Fetch the file again." in _refusal(folder)


def test_pickles_are_not_looked_for(folder: Path) -> None:
    """A folder without safetensors says what is read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert f"{folder} has no safetensors file: weights are read from no other format" in _refusal(folder)


def _shard(folder: Path) -> None:
    reference_model(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink()


def test_sharded_weights_give_the_same_logits(folder: Path) -> None:
    """An index of several files reads as one file does."""
    _shard(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    ids = torch.tensor(PROMPTS[-1])

    def logits(path: Path) -> torch.Tensor:
        model = models.load(path)
        return model.logits(model.forward(ids, torch.arange(len(ids)), DenseAttention(model.layers), rows=torch.tensor([3, 8])))

    torch.testing.assert_close(logits(folder), logits(tiny("llama_gqa")), atol=0, rtol=0)
    (folder / "model.safetensors.index.json").unlink()  # then all files are read
    torch.testing.assert_close(logits(folder), logits(tiny("llama_gqa")), atol=0, rtol=0)


def test_a_missing_shard_and_a_broken_index_are_named(folder: Path) -> None:
    """Before any weight is read."""
    _shard(folder)
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    assert f"names files that are not there: {lost.name}. Fetch them again." in _refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps([1]))
    assert "model.safetensors.index.json is not an index of safetensors files" in _refusal(folder)


def test_joined_tensors_are_copies_in_the_wanted_dtype(folder: Path) -> None:
    """Rows follow in the order of the names; nothing refers to the file afterwards."""
    weights = Weights(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    joined = weights.load(*names)
    stored = load_file(folder / "model.safetensors")
    expected = torch.cat([stored[name] for name in names]).bfloat16()
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(joined, expected)

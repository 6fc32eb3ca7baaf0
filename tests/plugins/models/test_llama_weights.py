"""Weights are read from safetensors, one file or several; what doesn't fit the config is named before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.errors import ModelSourceError
from octavo.plugins.models.llama.config import LlamaConfig
from octavo.plugins.models.llama.model import load
from octavo.plugins.models.llama.weights import Weights
from octavo.plugins.ops.torch_ops.ops import Linear, TorchOps
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


def _mapped_pages(file: Path) -> list[range]:
    """Addresses at which this process has the file mapped."""
    found = re.findall(rf"^(\w+)-(\w+) .* {re.escape(str(file))}$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [range(int(begin, 16), int(end, 16)) for begin, end in found]


def test_what_will_be_copied_is_seen_in_its_file(folder: Path) -> None:
    """`mapped`: every tensor is right wherever it lies, its pages alone are mapped, writing to it leaves the file, and nothing stays."""
    file = folder / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    weights = Weights(folder, dtype=torch.float32, device=torch.device("cpu"))
    before = file.read_bytes()
    for name, expected in stored.items():
        seen = weights.load(name, mapped=True)
        [pages] = _mapped_pages(file)
        assert seen.data_ptr() in pages and len(pages) <= seen.nbytes + 2 * 4096 and torch.equal(seen, expected)
        seen.zero_()
        del seen
        assert _mapped_pages(file) == []
    assert file.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_joined_or_converted_is_a_copy_all_the_same(folder: Path, dtype: torch.dtype) -> None:
    """`mapped` is what a tensor may be, where that is possible."""
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    loaded = Weights(folder, dtype=dtype, device=torch.device("cpu")).load(*(names if dtype is torch.float32 else names[:1]), mapped=True)
    assert loaded.dtype is dtype and _mapped_pages(folder / "model.safetensors") == []


@pytest.mark.parametrize("copies", [True, False])
def test_ops_that_copy_weights_get_no_copies(folder: Path, copies: bool) -> None:
    """All others do, since they keep what they are given; norms and embeddings, which the model keeps, are copies too."""
    file, mapped = folder / "model.safetensors", list[bool]()

    class Watching(TorchOps):
        copies_weights = copies

        def pack(self, weight: torch.Tensor, *given: Any, **options: Any) -> Linear:
            mapped.append(any(weight.data_ptr() in pages for pages in _mapped_pages(file)))
            return super().pack(weight.clone(), *given, **options)

        def pack_gate_up(self, gate: torch.Tensor, up: torch.Tensor, **options: Any) -> Linear:
            mapped.append(all(any(weight.data_ptr() in pages for pages in _mapped_pages(file)) for weight in (gate, up)))
            return super().pack_gate_up(gate, up, **options)

    config = LlamaConfig.read(json.loads((folder / "config.json").read_text()))
    load(config, folder, Watching(), dtype=torch.float32, device=torch.device("cpu"))
    of_layer = [False, copies, copies, copies]  # q, k and v are joined
    assert mapped == of_layer * config.shape.num_layers + [copies]
    assert _mapped_pages(file) == []

"""A loaded model that would compute something else over a flattened batch, or under another attention, is refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.core.errors import ModelSourceError
from octavo.core.model import Model
from octavo.plugins.models.transformers.attention import PROBE
from octavo.plugins.models.transformers.config import Unsupported, read_shape
from octavo.plugins.models.transformers.halves import Halves
from octavo.plugins.models.transformers.probe import probe
from tests.hf_models import config_of, load, tiny

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
_SMALL = _SIZES | {"vocab_size": 64, "max_position_embeddings": 64}


def _model(family: str = "olmo2", **overrides: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **overrides)).eval()
    model.set_attn_implementation(PROBE)
    return model


def _refusal(model: Any, **shape: Any) -> str:
    """What the probe says of a model, described by its own config but for what `shape` overrides."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]} | shape
    with pytest.raises(Unsupported) as caught:
        probe(Halves(model), read_shape(config), dtype=torch.float32, device=torch.device("cpu"))
    return str(caught.value)


def _wrap_attention(model: Any, layer: int, wrap: Any) -> None:
    """Have `wrap(forward, hidden_states, **arguments)` called in place of a layer's attention module."""
    attention = model.model.layers[layer].self_attn
    forward = attention.forward
    attention.forward = lambda hidden_states, **arguments: wrap(forward, hidden_states, **arguments)


def _save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------- by class


def test_a_class_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    """StableLM is not on the list of names, but says of itself that its attention cannot be replaced."""
    folder = _save(transformers.StableLmForCausalLM(transformers.StableLmConfig(**_SMALL)), tmp_path)
    with pytest.raises(ModelSourceError) as caught:
        load(folder)
    assert str(caught.value) == (
        "model plugin 'transformers' cannot run this model: "
        "StableLmForCausalLM does not hand its attention to the library's AttentionInterface"
    )


def test_the_name_of_the_model_stands_before_what_the_probe_finds(tmp_path: Path) -> None:
    """Differential attention calls the kernel twice a layer."""
    folder = _save(transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**_SMALL)), tmp_path)
    with pytest.raises(ModelSourceError) as caught:
        load(folder)
    assert str(caught.value) == (
        "model plugin 'transformers' cannot run this model: DiffLlamaForCausalLM: layer 0 calls its attention more than once"
    )


# ------------------------------------------------------------------- by probe


def test_keyword_arguments_that_do_not_arrive_are_noticed() -> None:
    """Nemotron's layers drop them."""
    model = transformers.NemotronForCausalLM(transformers.NemotronConfig(**_SMALL)).eval()
    model.set_attn_implementation(PROBE)
    assert _refusal(model) == "it does not hand keyword arguments on to its attention"


def test_a_layer_without_attention_is_noticed() -> None:
    """Here one that passes its input on."""
    model = _model()
    _wrap_attention(model, 1, lambda forward, hidden_states, **arguments: (hidden_states, None))
    assert _refusal(model).startswith("of its 2 layers 1 call their attention (see layer 1)")


def test_a_neighbour_s_influence_is_noticed() -> None:
    """Here a convolution over time before the attention, as hybrid models have it."""
    model = _model()
    _wrap_attention(model, 1, lambda forward, hidden, **arguments: forward(hidden + 0.5 * hidden.roll(1, 1), **arguments))
    assert _refusal(model).startswith("q of layer 1 depends on more than each token and its position")


@pytest.mark.parametrize("influence", [lambda x: x.roll(1, 1), lambda x: x.mean(1, keepdim=True)], ids=["neighbour", "mean"])
def test_influences_behind_the_last_attention_are_noticed(influence: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Here on the hidden states that the head reads: one token's, or all tokens' whatever their order."""
    model = _model()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output + influence(output))
    assert _refusal(model).startswith("its logits depend on more than each token, its position and attention")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_ignored_position_ids_are_noticed(family: str) -> None:
    """Learned or rotary: a model that counts positions itself is wrong in a flattened batch."""
    model = _model(family)
    inner = model.base_model
    forward = inner.forward
    inner.forward = lambda *inputs, position_ids, **arguments: forward(*inputs, **arguments)
    assert "depends on more than each token and its position" in _refusal(model)


def test_an_unknown_argument_is_named() -> None:
    """A kernel would silently ignore it."""
    model = _model()
    _wrap_attention(model, 0, lambda forward, hidden, **arguments: forward(hidden, **arguments, position_bias=torch.zeros(1)))
    assert _refusal(model) == "layer 0 gives its attention position_bias, which kernels would ignore"


def test_chunked_attention_is_noticed_by_its_mask() -> None:
    """Llama 4's mask is causal within chunks; its own name is refused before, so it is called by another."""
    sizes = _SMALL | {"intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 16, "attention_chunk_size": 8}
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, pad_token_id=None)).eval()
    model.set_attn_implementation(PROBE)
    assert _refusal(model, model_type="llama", layer_types=None).startswith("layer 0 has a mask that is neither causal nor a window")


def test_a_bidirectional_model_is_noticed_by_its_mask() -> None:
    """Gemma 3 can be told to look ahead, as embedding models do."""
    assert _refusal(_model("gemma3", use_bidirectional_attention=True)) == (
        "layer 0 has a mask that is neither causal nor a window, which kernels would ignore"
    )


def test_a_changed_mask_is_noticed() -> None:
    """A model may add to the mask what kernels would ignore."""
    model = _model()
    _wrap_attention(
        model, 0, lambda forward, hidden, attention_mask, **arguments: forward(hidden, attention_mask=~attention_mask, **arguments)
    )
    assert _refusal(model) == "layer 0 has a mask of its own, which kernels would ignore"


def test_sinks_that_the_description_lacks_are_noticed() -> None:
    """A kernel is chosen by the description: one that ignores sinks would be chosen."""
    assert _refusal(_model("gpt_oss"), model_type="mixtral") == "layer 0 has sinks = True, but False was read from its config.json"


def test_a_window_that_the_description_lacks_is_noticed() -> None:
    """Likewise."""
    assert _refusal(_model("phi3"), sliding_window=None) == "layer 0 has window = 8, but None was read from its config.json"


def test_a_soft_cap_that_the_description_lacks_is_noticed() -> None:
    """Likewise."""
    assert _refusal(_model("gemma2"), attn_logit_softcapping=None) == "layer 0 has softcap = 2.0, but None was read from its config.json"


def test_other_heads_than_described_are_noticed() -> None:
    """The cache is sized by the description."""
    assert _refusal(_model(), num_key_value_heads=4) == "k of layer 0 has 2 heads of 16, but 4 of 16 were read from its config.json"


def test_logits_that_read_more_than_hidden_states_are_noticed() -> None:
    """Here a head that reads the hidden state before its own as well."""
    model = _model()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + output.roll(1, 1))
    assert _refusal(model) == "its logits are not a function of each hidden state of its decoder"


def test_a_head_that_fails_on_hidden_states_alone_is_refused_with_its_error() -> None:
    """Here one that is not told which tokens they are of."""
    model = _model()
    forward = model.forward
    model.forward = lambda input_ids=None, position_ids=None, **arguments: forward(
        input_ids=input_ids, position_ids=position_ids + 0, **arguments
    )
    assert _refusal(model).startswith("its logits cannot be computed from hidden states of its decoder: TypeError: ")


def test_a_forward_that_fails_is_refused_with_its_error() -> None:
    """Whatever a model's code raises over one flattened row of tokens."""
    model = _model()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output.view(3, -1))
    assert _refusal(model).startswith("its forward pass fails over a flattened batch: RuntimeError: shape '[3, -1]' is invalid")


# ------------------------------------------------------------------- by files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny model's folder."""
    return Path(shutil.copytree(tiny("granite"), tmp_path / "granite"))


def _load_changed(folder: Path, change: Any) -> Model:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return load(folder)


def test_missing_and_unexpected_weights_are_named(folder: Path) -> None:
    """The library would fill the missing ones with random numbers."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")

    with pytest.raises(ModelSourceError) as caught:
        _load_changed(folder, change)
    assert str(caught.value) == (
        f"the weights in {folder} do not fit its config.json:\n"
        "  - missing: model.layers.1.mlp.gate_proj.weight\n"
        "  - unexpected: model.layers.0.mlp.gate.weight"
    )


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    """Too few rows in one matrix."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1].clone()

    with pytest.raises(
        ModelSourceError, match=r"shape of model\.layers\.0\.mlp\.up_proj\.weight: \[95, 64\], config\.json asks for \[96, 64\]"
    ):
        _load_changed(folder, change)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    """Only safetensors are opened."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelSourceError, match=f"cannot read the weights in {folder}: OSError: .*model.safetensors"):
        load(folder)


def test_a_model_s_own_code_is_never_run(folder: Path) -> None:
    """A folder of a known type that brings code is loaded as the library knows it."""
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    (folder / "own.py").write_text("raise SystemExit('this code must not run')\n")
    assert load(folder).shape.architecture == "GraniteForCausalLM"

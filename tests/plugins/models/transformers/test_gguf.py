"""A GGUF file of a family that only transformers knows runs through the same door: converted once, then loaded as any folder.

The files are written as llama.cpp's converter does, and hold figures that transformers' own reader skips.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from octavo.core.errors import ModelSourceError
from octavo.core.sources import convert, resolve
from tests.dense_attention import DenseAttention
from tests.hf_models import NEW_TOKENS, PROMPTS, config_of, load
from tests.models import VOCAB, WINDOW, reference_gap, reference_model, reference_tokens, save_scaled

_DECODER: dict[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
_GEMMA = _DECODER | {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.sliding_window": WINDOW,
    "attention.scale": 24**-0.5,
    "attention.sliding_window_pattern": 2,
    "rope.freq_base": 1e6,
}
_GPT2_MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_PHI3 = _DECODER | {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.scaling.original_context_length": 64}
_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}


# name -> (family, what its config has beside the tiny model's, seed, figures of the file, tensors without a parameter)
CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any], dict[str, list[float]]]] = {
    "gpt2": (
        "gpt2",
        {"n_positions": 640, "n_inner": 160},
        1,
        {k: v for k, v in _DECODER.items() if k not in ("attention.head_count_kv", "attention.layer_norm_rms_epsilon")}
        | {"context_length": 640, "feed_forward_length": 160, "attention.layer_norm_epsilon": 1e-5},
        {},
    ),
    "gemma2": (
        "gemma2",
        {"final_logit_softcapping": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        2,
        _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {},
    ),
    "gemma3": (
        "gemma3",
        {
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        3,
        _GEMMA
        | {"final_logit_softcapping": 3.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
        | {"rope.freq_base_swa": 500.0},
        {},
    ),
    "qwen3moe": (
        "qwen3_moe",
        {"norm_topk_prob": True},
        1,
        _DECODER
        | {"attention.key_length": 16, "attention.value_length": 16, "rope.freq_base": 10000.0}
        | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48, "expert_gating_func": 1},
        {},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        1,
        _PHI3 | {"attention.sliding_window": WINDOW, "rope.dimension_count": 8},
        {},
    ),
    "phi3_long": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **_FACTORS},
        },
        2,
        _PHI3 | {"attention.sliding_window": 0, "rope.scaling.attn_factor": 1.224745},  # sqrt(1 + log(512 / 64) / log(64))
        {"rope_factors_long.weight": _FACTORS["long_factor"], "rope_factors_short.weight": _FACTORS["short_factor"]},
    ),
}
SKIPPED_BY_TRANSFORMERS = ("gemma2", "gemma3", "phi3", "phi3_long")  # without a word; the others do not fit


def _byte_level_vocabulary() -> list[str]:
    """VOCAB tokens: the 256 bytes as GPT-2 writes them, and merges of a letter with itself."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters + [2 * letter for letter in letters[: VOCAB - len(letters)]]


def write(path: Path, name: str, figures: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """A GGUF file of the architecture `name`."""
    writer = gguf.GGUFWriter(path, name)
    for key, value in figures.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{name}.{key}", value)
    tokens = _byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in tokens if len(token) == 2])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(model: transformers.PreTrainedModel, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The model's parameters as llama.cpp's converter names and lays them out."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for ours, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if ours.endswith("experts.gate_up_proj"):
            layer = ours.split(".")[2]
            found[f"blk.{layer}.ffn_gate_exps.weight"], found[f"blk.{layer}.ffn_up_exps.weight"] = np.split(weight, 2, axis=1)
            continue
        if name == "gpt2" and ours.endswith(_GPT2_MATRICES):
            weight = weight.T
        if name.startswith("gemma") and ours.endswith("norm.weight"):
            weight = weight + 1
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        found[theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight"] = weight
    return found


@pytest.fixture(autouse=True)
def octavo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))


def original_and_file(case: str, folder: Path) -> tuple[Path, Path]:
    """A random model with the true config, and the file that holds it."""
    family, overrides, seed, figures, factors = CASES[case]
    original = save_scaled(config_of(family, **overrides), family, seed=seed)
    name = case.partition("_")[0]
    more = {tensor: np.array(values) for tensor, values in factors.items()}
    return original, write(folder / f"{case}.gguf", name, figures, tensors_of(reference_model(original), name) | more)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_are_the_original_s(case: str, tmp_path: Path) -> None:
    """In fp32: our model's logits are those of transformers with the true config and the same weights, and so are its greedy tokens."""
    original, file = original_and_file(case, tmp_path)
    found = resolve(file)
    assert found.config["architectures"] == [type(reference_model(original)).__name__]
    model, ids = load(found.path), torch.tensor(PROMPTS[2])
    logits = model.logits(model.forward(ids, torch.arange(len(ids)), DenseAttention(model.layers), rows=torch.arange(len(ids))))
    with torch.no_grad():
        torch.testing.assert_close(logits, reference_model(original)(ids[None]).logits[0], atol=1e-3, rtol=1e-4)
    assert reference_gap(original, PROMPTS, NEW_TOKENS) > 1e-4
    assert reference_tokens(found.path, PROMPTS, NEW_TOKENS) == reference_tokens(original, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_skips_shows(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to transformers' reader, the same file gives other tokens, or does not fit: the test above can fail."""
    monkeypatch.setattr(convert, "complete_config", lambda config, header: None)
    original, file = original_and_file(case, tmp_path)
    if case in SKIPPED_BY_TRANSFORMERS:
        assert reference_tokens(resolve(file).path, PROMPTS, NEW_TOKENS) != reference_tokens(original, PROMPTS, NEW_TOKENS)
    else:
        with pytest.raises(ModelSourceError, match="cannot be converted"):
            resolve(file)


@pytest.mark.parametrize("figure", ["attn_logit_softcapping", "final_logit_softcapping", "attention.scale", "attention.sliding_window"])
def test_each_figure_of_gemma2_counts(figure: str, tmp_path: Path) -> None:
    """Another value in the file gives other logits."""
    original, file = original_and_file("gemma2", tmp_path)
    figures = CASES["gemma2"][3]
    other = write(
        tmp_path / "other.gguf", "gemma2", figures | {figure: figures[figure] * 2}, tensors_of(reference_model(original), "gemma2")
    )
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        right, wrong = (reference_model(resolve(path).path)(ids).logits for path in (file, other))
    assert (right - wrong).abs().max() > 0.05


@pytest.mark.parametrize("name", ["gptneox", "opt", "granite", "command-r", "cohere2", "olmo2"])
def test_what_transformers_does_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Its GGUF reader has no entry for these families, which run from their original folders."""
    file = write(tmp_path / "model.gguf", name, _DECODER, {"token_embd.weight": np.zeros((VOCAB, 64))})
    with pytest.raises(ModelSourceError) as caught:
        resolve(file)
    assert str(caught.value).startswith(f"{file} (GGUF, architecture {name!r}) cannot be converted: transformers does not read it")
    assert "Take the model's original folder, with safetensors." in str(caught.value)


def test_mixtral_is_refused(tmp_path: Path) -> None:
    """In GGUF it is a Llama with experts, of which transformers would read the Llama alone and make up the rest."""
    figures = _DECODER | {"expert_count": 8, "expert_used_count": 2}
    file = write(tmp_path / "mixtral.gguf", "llama", figures, {"token_embd.weight": np.zeros((VOCAB, 64))})
    with pytest.raises(ModelSourceError, match=r"it has 8 experts \(as Mixtral\), and transformers reads this architecture only without"):
        resolve(file)


def test_a_weight_that_lacks_or_has_no_place_is_refused(tmp_path: Path) -> None:
    """A missing tensor would be random numbers, and one too many would be dropped: a model whose k has a bias, for example."""
    original, _ = original_and_file("phi3", tmp_path)
    tensors = tensors_of(reference_model(original), "phi3")
    more = write(tmp_path / "more.gguf", "phi3", CASES["phi3"][3], tensors | {"blk.0.attn_qkv.bias": np.ones(128)})
    with pytest.raises(ModelSourceError, match=r"it has \d+ weights, of which Phi3ForCausalLM takes \d+\. Take the model"):
        resolve(more)
    del tensors["blk.1.ffn_down.weight"]
    less = write(tmp_path / "less.gguf", "phi3", CASES["phi3"][3], tensors)
    with pytest.raises(ModelSourceError, match=r"it has no model\.layers\.1\.mlp\.down_proj\.weight \(one of 1 tensors"):
        resolve(less)

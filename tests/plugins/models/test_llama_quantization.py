"""`quantization` of the llama plugin: the same tokens with every set of ops, all linears packed, refused where it cannot be had."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from octavo.core.compat import problems
from octavo.core.errors import InvalidOptionsError
from octavo.core.model import Model, Ops
from octavo.core.native import absence, load
from octavo.core.quantization import Quantization
from octavo.core.registry import Registry
from octavo.core.settings.config import load_config
from octavo.core.sources import ModelSource
from octavo.core.stack import Choice, Stack
from octavo.llm import LLM
from octavo.plugins.models.llama import LLAMA, LlamaOptions, build
from octavo.plugins.ops.cpu.ops import CpuOps
from octavo.plugins.ops.torch_ops.ops import TorchOps
from tests.dense_attention import DenseAttention, greedy
from tests.models import FAMILIES, PROMPTS, tiny

KINDS: tuple[Quantization, ...] = ("int8", "int4")


def model_of(family: str, ops: Ops, kind: Quantization | None, dtype: torch.dtype = torch.float32, **overrides: Any) -> Model:
    folder = tiny(family, dtype=dtype, **overrides)
    config = json.loads((folder / "config.json").read_text())
    source = ModelSource(name=family, path=folder, origin="a test", revision="local", config=config, generation_config={})
    return build(source, LlamaOptions(quantization=kind), ops, dtype=dtype, device=torch.device("cpu"))


def logits(model: Model) -> torch.Tensor:
    ids = torch.tensor(PROMPTS[-1])
    positions = torch.arange(len(ids))
    return model.logits(model.forward(ids, positions, DenseAttention(model.layers), rows=positions))


def tokens(model: Model) -> list[list[int]]:
    return [greedy(model, prompt, 12, attend=DenseAttention(model.layers)) for prompt in PROMPTS]


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ops_give_the_same_tokens(family: str, kind: Quantization) -> None:
    """In fp32, packed codes as dequantised weights, whose logits are not those of the whole weights."""
    reference, packed = model_of(family, TorchOps(), kind), model_of(family, CpuOps(load(), torch.float32), kind)
    whole = model_of(family, TorchOps(), None)
    assert tokens(packed) == tokens(reference)
    found, expected, unquantized = (logits(model) for model in (packed, reference, whole))
    assert (found - expected).abs().max() < 1e-3 < (unquantized - expected).abs().max()


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
def test_weights_take_the_bytes_of_their_codes() -> None:
    """Of a model whose sizes are whole panels at every level: linears by their bits, the head at 8, norms and an untied embedding whole."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24, "vocab_size": 384}
    for tied in (True, False):
        whole, int8, int4 = (
            model_of("llama_gqa", CpuOps(load(), torch.bfloat16), kind, torch.bfloat16, tie_word_embeddings=tied, **sizes).weight_bytes()
            for kind in (None, "int8", "int4")
        )
        head, blocks = 384 * 96, 2 * (2 * 96 * 96 + 2 * 48 * 96 + 3 * 96 * 192)
        columns = 2 * (96 + 2 * 48 + 96 + 2 * 192 + 96)  # outputs of all blocks: each has a scale of 4 bytes
        assert whole - int8 == head + blocks - 4 * 384 - 4 * columns
        assert whole - int4 == head + blocks * 11 // 8 - 4 * 384


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
def test_an_engine_takes_the_option() -> None:
    """From LLM's arguments; int4 answers, with the tokens of torch ops."""
    answers = []
    for ops in ("cpu", "torch"):
        with LLM(model=str(tiny("llama_gqa")), model_plugin={"plugin": "llama", "quantization": "int4"}, ops=ops, num_kv_slots=512) as llm:
            answers.append(llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], use_tqdm=False))
            assert llm.built.loaded.model.weight_bytes() > 0
    first, second = ([output.outputs[0].token_ids for output in outputs] for outputs in answers)
    assert first == second


def test_ops_that_lack_it_are_named() -> None:
    """A set of ops without the capability is refused before anything is loaded."""
    from dataclasses import replace

    registry = Registry.discover()
    shape = LLAMA.describe(json.loads((tiny("llama_gqa") / "config.json").read_text()))
    facts = shape.facts(device="cpu", dtype="float32", kv_dtype="float32")
    parts = {kind: Choice.default(registry.preferred(kind)[0]) for kind in ("scheduler", "allocator", "ops")}
    plain = replace(registry.get("ops", "torch"), name="plain", provides=frozenset())
    stack = Stack(
        model=Choice(LLAMA, LlamaOptions(quantization="int4")),
        kernel=Choice.default(registry.get("kernel", "sdpa")),
        **(parts | {"ops": Choice.default(plain)}),
    )
    found = problems(stack, facts)
    assert any("needs weights:int4, which ops 'plain' does not provide" in problem for problem in found), found
    assert any("needs weights:int8, which ops 'plain' does not provide" in problem for problem in found)
    assert problems(stack.with_part(Choice.default(registry.get("ops", "torch"))), facts) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"plugin": "transformers", "quantization": "int8"}, r"model.transformers.quantization: .* is an option of model 'llama'"),
        ({"plugin": "auto", "quantization": "int8"}, r"model.auto.quantization: .*name the model plugin to set its options"),
        ({"plugin": "llama", "quantization": "int3"}, r"model.llama.quantization: Input should be 'int8' or 'int4' \(got 'int3'\)"),
    ],
)
def test_what_cannot_be_had_is_refused(table: dict[str, str], message: str) -> None:
    """The transformers plugin computes with the library's own linears; other numbers of bits do not exist."""
    with pytest.raises(InvalidOptionsError, match=message):
        load_config(Registry.discover(), overrides={"model": {"source": "x"} | table})

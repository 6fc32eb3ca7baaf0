"""A step's bytes and operations are those that PyTorch counts, and a share is of what the device was seen to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from octavo.bench import roofline as module
from octavo.bench.roofline import CostModel, Limits, cost_model, measure_limits, roofline
from octavo.bench.step_log import StepLine, StepLog
from tests.bench.pools import rig
from tests.hf_models import tiny as hf_tiny
from tests.matrix.stacks import loaded
from tests.models import tiny

COSTS = CostModel(block_weights=100, head_weights=10, weight_bytes=2, kv_bytes=8, flops_per_pair=3)
LIMITS = Limits(bandwidth=1000.0, flops=10_000.0, dtype="bfloat16")


def lines() -> list[StepLine]:
    """A prompt of 5, then two decode steps."""
    made, log = rig("paged", slots=40), StepLog(0.0)
    made.add(5, 3)
    with log.watching(made.engine):
        made.finish()
    return log.lines


def test_bytes_and_operations_of_a_step() -> None:
    """Weights once, the context read and the new KV written; two operations a weight and token, the head for the drawn row alone."""
    prompt, decode, _ = lines()
    cost = COSTS.of(prompt)
    assert (cost.num_bytes, cost.flops) == (110 * 2 + (5 + 5) * 8, 2 * (100 * 5 + 10) + 3 * 15)
    cost = COSTS.of(decode)
    assert (cost.num_bytes, cost.flops) == (110 * 2 + (6 + 1) * 8, 2 * 110 + 3 * 6)
    assert COSTS.of(replace(prompt, num_sampled=0)).num_bytes == 100 * 2 + 80


def test_the_linears_are_counted_as_pytorch_counts_them() -> None:
    """With attention left out: operations of a forward pass of 7 tokens with logits of 2."""
    of = loaded(tiny("llama_gqa"), "llama", "torch")
    costs = cost_model(of)
    ids = torch.arange(7)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        hidden = of.model.forward(ids, ids, lambda layer, q, k, v: q.new_zeros(*q.shape[:2], v.shape[2]), rows=ids[:2])
        of.model.logits(hidden)
    line = replace(lines()[0], num_tokens=7, num_sampled=2, num_pairs=0)
    norms = 2 * 7 * of.shape.hidden_size * (2 * of.shape.num_layers + 1)  # weights that no product uses
    assert costs.of(line).flops == counter.get_total_flops() + norms
    assert costs.kv_bytes == of.shape.num_layers * of.shape.num_kv_heads * of.shape.head_size_k * 2 * 4


def test_tied_embeddings_are_read_once() -> None:
    """GPT-2 ties them where its config.json says nothing: the blocks are all parameters but one table."""
    of = loaded(hf_tiny("gpt2"), "transformers", "torch")
    of = replace(of, source=replace(of.source, config={k: v for k, v in of.source.config.items() if k != "tie_word_embeddings"}))
    costs, table = cost_model(of), of.shape.vocab_size * of.shape.hidden_size
    assert costs.head_weights == table
    assert costs.block_weights == of.model.weight_bytes() // 4 - table


def test_shares_by_kind_of_step() -> None:
    """Of the steps that decode and of those that compute prompts; undone ones are left out."""
    prompt, first, second = (replace(line, seconds={"forward": 0.5, "sample": 0.1, "apply": 9.0}) for line in lines())
    found = roofline([prompt, first, replace(second, error="undone")], COSTS, LIMITS)
    assert (found["prompts"].steps, found["decode"].steps) == (1, 1)
    assert found["decode"].share == pytest.approx(max(276 / 1000, 238 / 10_000) / 0.6)
    assert (found["decode"].memory_bound, found["decode"].seconds) == (1, 0.6)
    assert roofline([], COSTS, LIMITS) == {}
    assert roofline([replace(prompt, num_context=0, num_pairs=10_000)], COSTS, LIMITS)["prompts"].memory_bound == 0


def test_the_ridge_batch() -> None:
    """An H200's 989 TFLOP/s over 4.8 TB/s in bf16: 206 tokens."""
    assert Limits(bandwidth=4.8e12, flops=989e12, dtype="bfloat16").ridge_batch == pytest.approx(206, abs=0.5)


def test_limits_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plausible figures for any computer, and the second call is free."""
    monkeypatch.setattr(module, "MEASURE_S", 0.05)
    module._measured.cache_clear()
    found = measure_limits("cpu", "float32")
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.flops < 1e15
    assert measure_limits("cpu", "float32") is found
    module._measured.cache_clear()

"""Fault 10: what a model computes after a cached prefix is what it computes from the beginning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from tests.matrix.stacks import build, generate, stack_reports
from tests.models import PROMPTS, tiny

STACKS = {str(r.stack): r.stack for r in stack_reports(tiny("llama_gqa")) if r.runs and r.stack.allocator.name == "prefix"}


def logits(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts: Any) -> list[torch.Tensor]:
    """Each prompt's logits, in fp32, at its last position and over three steps of decoding; one prompt at a time."""
    model, rows = llm.built.loaded.model, list[torch.Tensor]()

    def watched(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(self.logits(hidden))
        return rows[-1].argmax(-1)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "argmax", watched)
        for prompt in prompts:
            generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=4))
    return rows


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama_gqa", "mistral"])
@pytest.mark.parametrize("name", STACKS)
def test_warm_logits_equal_cold_logits(name: str, family: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions go on from the hit, and attention covers the cached blocks; windows too."""
    options = {"max_model_len": 64, "num_kv_slots": 1024, "max_num_seqs": 4, "block_size": block_size}
    with LLM.from_built(build(tiny(family), STACKS[name], **options)) as llm:
        cold = logits(llm, monkeypatch, PROMPTS)
        found = llm.engine.kv.stats().hit_tokens
        warm = logits(llm, monkeypatch, PROMPTS)
        assert llm.engine.kv.stats().hit_tokens - found == sum((len(p) - 1) // block_size * block_size for p in PROMPTS)
        for one, other in zip(cold, warm, strict=True):
            torch.testing.assert_close(other, one, atol=1e-3, rtol=1e-4)


def test_there_is_a_stack_to_test() -> None:
    assert STACKS

"""Stacks with `triton_paged` give transformers' tokens too, its functions run by Triton's interpreter on the CPU.

An interpreted program costs milliseconds, so this is a covering array of short runs; on a GPU the kernel's own tests run compiled.
"""

from __future__ import annotations

from typing import Any

import pytest
from allpairspy import AllPairs

from octavo.core.assembly import build_engine
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.core.stack import Stack
from octavo.llm import LLM
from tests.matrix.stacks import REGISTRY, generate, loaded, settings, stack_reports
from tests.models import FAMILIES, PROMPTS, reference_tokens, tiny
from tests.plugins.kernels.cases import INTERPRETED

NEW_TOKENS = 4
SHORT = PROMPTS[:3]  # of 1, 5 and 11 tokens: one is longer than the window
STACKS: dict[tuple[str, str, str], Stack] = {
    (stack.scheduler.name, stack.allocator.name, stack.model.name): stack
    for stack in (report.stack for report in stack_reports(tiny("llama_gqa")))
    if stack.kernel.name == "triton_paged" and stack.ops.name == "torch"
}
AXES: list[list[Any]] = [*(sorted({names[i] for names in STACKS}) for i in range(3)), list(FAMILIES), [3, 16]]
CASES = [tuple(case) for case in AllPairs(AXES)]


@pytest.mark.parametrize(
    ("scheduler", "allocator", "model", "family", "block_size"),
    [pytest.param(*case, marks=[pytest.mark.slow] if number >= 4 else []) for number, case in enumerate(CASES)],
)
def test_interpreted_kernel_gives_the_tokens_of_transformers(
    scheduler: str, allocator: str, model: str, family: str, block_size: int
) -> None:
    """Every scheduler, allocator and model plugin with every other one and every family, prompts batched, unwritten KV NaN."""
    if not INTERPRETED:
        pytest.skip("Triton compiles for a GPU here: see tests/plugins/kernels, or set TRITON_INTERPRET=1")
    folder, stack = tiny(family), STACKS[scheduler, allocator, model]
    sections = settings(stack, max_model_len=16, num_kv_slots=64, max_num_seqs=3, block_size=block_size)
    sections["kernel"] = {"plugin": "triton_paged", "interpret": True}
    config = load_config(REGISTRY, environ={}, overrides=sections)
    with LLM.from_built(build_engine(REGISTRY, config, loaded(folder, model, "torch"))) as llm:
        outputs = generate(llm, SHORT, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    expected = [tokens[:NEW_TOKENS] for tokens in reference_tokens(folder, PROMPTS, 24)[: len(SHORT)]]
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == expected


def test_every_scheduler_allocator_and_model_meets_the_kernel() -> None:
    """The array covers what is installed."""
    for axis, names in enumerate(AXES[:3]):
        assert {case[axis] for case in CASES} == set(names)
        assert len(names) >= 2

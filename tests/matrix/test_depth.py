"""Two steps in flight on real tensors: the next step is planned before the last one's tokens are known, and no token changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.core.engine import Engine
from octavo.core.inputs import InputBuilder, StepInputs
from octavo.core.plan import BatchPlan
from octavo.core.sampling_params import SamplingParams
from octavo.core.torch_runner import TorchRunner
from octavo.llm import LLM
from tests.matrix.stacks import Steps, build, generate
from tests.matrix.test_equal_tokens import MAX_MODEL_LEN, PAGED, POOLS, STACKS, pairs
from tests.models import FAMILIES, NEW_TOKENS, PROMPTS, reference_tokens, tiny

FAMILY_OF = {name: FAMILIES[number % len(FAMILIES)] for number, name in enumerate(STACKS)}
SAMPLED = [SamplingParams(temperature=0.8, top_p=0.9, seed=number, max_tokens=NEW_TOKENS - number) for number in range(len(PROMPTS))]


def at_depth(depth: int, name: str, pool: str) -> LLM:
    """The stack with so many steps in flight; a config cannot ask for that yet."""
    options = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": POOLS[pool], "max_num_seqs": len(PROMPTS), "block_size": 4}
    built = build(tiny(FAMILY_OF[name]), STACKS[name], **options)
    shallow = built.engine
    assert isinstance(shallow.runner, TorchRunner)
    runner = TorchRunner(
        shallow.runner.model,
        shallow.runner.kernel,
        shallow.kv,
        clock=shallow.clock,
        max_rows=len(PROMPTS),
        depth=depth,
        debug=True,
    )
    engine = Engine(
        scheduler=shallow.scheduler,
        kv=shallow.kv,
        runner=runner,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=shallow.vocab_size,
        tokenizer=shallow.tokenizer,
        clock=shallow.clock,
        depth=depth,
        debug=True,
    )
    return LLM.from_built(dataclasses.replace(built, engine=engine))


def ids(llm: LLM, params: Any) -> tuple[tuple[int, ...], ...]:
    """Tokens of all prompts, batched."""
    return tuple(tuple(output.outputs[0].token_ids) for output in generate(llm, PROMPTS, params))


@pytest.mark.parametrize(("name", "pool"), pairs(list(POOLS)))
def test_two_steps_in_flight_change_no_token(name: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy as transformers, sampled as with one step in flight; most decode steps run on a token that the host did not know."""
    unknown = [0, 0]
    make = InputBuilder.build

    def counted(self: InputBuilder, plan: BatchPlan) -> StepInputs:
        inputs = make(self, plan)
        unknown[0] += inputs.input_from is not None
        unknown[1] += 1
        return inputs

    steps = Steps()
    with at_depth(1, name, pool) as llm:
        expected = ids(llm, SAMPLED)
    with at_depth(2, name, pool) as llm:
        llm.engine.observers.add(steps)
        monkeypatch.setattr(InputBuilder, "build", counted)
        greedy = ids(llm, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
        assert greedy == reference_tokens(tiny(FAMILY_OF[name]), PROMPTS, NEW_TOKENS)
        assert ids(llm, SAMPLED) == expected
        usage = llm.engine.kv.usage()
        assert usage.filled == usage.held == 0
    assert unknown[0] > 0.7 * unknown[1]
    if pool == "tiny" and STACKS[name].scheduler.name != "static" and STACKS[name].allocator.name in PAGED:
        assert steps.preemptions > 0

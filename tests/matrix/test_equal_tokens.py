"""The same tokens, whatever the stack: each equals transformers' greedy `generate`, in fp32.

Over every stack that runs x family x alone or batched x cold or warm x ample pool or one that preempts x block size x token budget. A
pairwise covering array runs always, the whole product under `make test-all`. Unwritten KV is NaN, and invariants are checked after each
step.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import pytest
from allpairspy import AllPairs

from octavo.core.assembly import build_engine
from octavo.core.descriptors import SchedulerPlugin
from octavo.core.errors import IncompatibleStackError
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.llm import LLM
from tests.matrix.stacks import KINDS, REGISTRY, Steps, build, generate, loaded, settings, stack_reports
from tests.models import FAMILIES, NEW_TOKENS, PROMPTS, reference_tokens, tiny

MAX_MODEL_LEN = 64  # the longest prompt and its answer need 57
PAGED = ("paged", "prefix")
POOLS = {"ample": 1024, "tiny": MAX_MODEL_LEN}
REPORTS = stack_reports(tiny("llama_gqa"))
RUNNING = {str(report.stack): report.stack for report in REPORTS if report.runs}
# A model of the transformers library brings its own linears and norms: other ops would change nothing about it.
STACKS = {name: stack for name, stack in RUNNING.items() if stack.model.name != "transformers" or stack.ops.name == "torch"}
OTHERS_OF = {name: name.rsplit(" + ", 2)[0] for name in STACKS}  # scheduler, allocator and kernel
MODEL_OF = {name: name.removeprefix(f"{OTHERS_OF[name]} + ") for name in STACKS}  # ops and model
BUDGETS = [None, 8, 13]  # where prompts are cut: the default holds them whole, the others cut them between and within blocks
AXES: list[list[Any]] = [list(FAMILIES), ["alone", "batched"], list(POOLS), [1, 4, 16], BUDGETS]


def pairs(*axes: list[Any]) -> list[tuple[Any, ...]]:
    """A pairwise covering array of stacks and these axes, in which every stack occurs; ops and model are an axis of their own."""
    by_parts = {(OTHERS_OF[name], MODEL_OF[name]): name for name in STACKS}
    others, models = list(dict.fromkeys(OTHERS_OF.values())), list(dict.fromkeys(MODEL_OF.values()))
    found = AllPairs([others, models, *axes], filter_func=lambda row: len(row) < 2 or (row[0], row[1]) in by_parts)
    cases = [(by_parts[row[0], row[1]], *row[2:]) for row in found]
    assert {case[0] for case in cases} == set(STACKS)
    return cases


def chunking(name: str) -> bool:
    """Whether the stack's scheduler cuts prompts."""
    return cast(SchedulerPlugin, STACKS[name].scheduler.plugin).chunking


def check(name: str, family: str, company: str, pool: str, block_size: int, budget: int | None = None) -> Steps:
    """Cold and then warm, this stack gives transformers' tokens and leaves nothing behind. `budget` is for schedulers that cut prompts."""
    folder, params = tiny(family), SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    expected = reference_tokens(folder, PROMPTS, NEW_TOKENS)
    steps = Steps()
    options = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": POOLS[pool], "max_num_seqs": len(PROMPTS), "block_size": block_size}
    if budget and chunking(name):
        options["max_num_batched_tokens"] = budget
    with LLM.from_built(build(folder, STACKS[name], **options)) as llm:
        llm.engine.observers.add(steps)
        for _ in ("cold", "warm"):
            batches = [PROMPTS] if company == "batched" else [(prompt,) for prompt in PROMPTS]
            outputs = [output for batch in batches for output in generate(llm, batch, params)]
            assert tuple(tuple(output.outputs[0].token_ids) for output in outputs) == expected
            usage = llm.engine.kv.usage()
            assert usage.filled == usage.held == 0
        if STACKS[name].allocator.name == "prefix" and pool == "ample":  # in the tiny one, evictions may leave nothing to hit
            assert llm.engine.kv.stats().hit_tokens > 0, "the warm run was none"
    if budget and chunking(name):
        assert max(report.num_tokens for report in steps.reports) == budget
    return steps


@pytest.mark.parametrize(("name", "family", "company", "pool", "block_size", "budget"), pairs(*AXES))
def test_tokens_equal_transformers(name: str, family: str, company: str, pool: str, block_size: int, budget: int | None) -> None:
    """A pairwise covering array of all axes."""
    check(name, family, company, pool, block_size, budget)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "family"), list(itertools.product(STACKS, FAMILIES)))
def test_tokens_equal_transformers_in_full(name: str, family: str) -> None:
    """The whole product."""
    for rest in itertools.product(*AXES[1:-1], BUDGETS if chunking(name) else [None]):
        check(name, family, *rest)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_tiny_pool_preempts(block_size: int) -> None:
    """With blocks handed out as sequences grow, the tiny pool runs dry (fault 14): the tokens above were right through preemptions."""
    growing = [f"{scheduler} + {allocator} + sdpa + torch + llama" for scheduler in ("continuous", "chunked") for allocator in PAGED]
    for name in growing:
        assert check(name, "llama_gqa", "batched", "tiny", block_size).preemptions > 0


def test_every_stack_runs_or_says_why() -> None:
    """A stack that cannot run raises with all its problems; no combination is passed over in silence."""
    refused = 0
    for report in REPORTS:
        if report.runs:
            continue
        overrides = settings(report.stack, max_model_len=MAX_MODEL_LEN, num_kv_slots=64)
        with pytest.raises(IncompatibleStackError) as error:
            build_engine(REGISTRY, load_config(REGISTRY, environ={}, overrides=overrides), loaded(tiny("llama_gqa"), "llama", "torch"))
        assert all(problem in str(error.value) for problem in report.problems)
        refused += 1
    assert refused + len(RUNNING) == math.prod(len(REGISTRY.names(kind)) for kind in KINDS)


def test_every_installed_plugin_is_in_some_stack_that_runs() -> None:
    """No plugin of the table is there for show: each is part of a stack that runs here, or its refusal names what it needs."""
    for kind in ("scheduler", "allocator", "kernel", "ops"):
        running = {stack.names[kind] for stack in STACKS.values()}
        for missing in set(REGISTRY.names(kind)) - running:
            reasons = [problem for report in REPORTS if report.stack.names[kind] == missing for problem in report.problems]
            assert any("needs" in reason for reason in reasons), missing

"""The same structured outputs, whatever the stack: each is what transformers' logits give, masked, one token after the other.

The expected tokens come from `reference_model` and a matcher of the test's own; neither engine, cache, kernel nor mask thread has a part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from octavo.core.grammar.compiler import GrammarCompiler, next_tokens
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.core.text.tokenizer import Tokenizer
from octavo.llm import LLM
from tests.core.test_torch_runner import Broken, failing
from tests.matrix.stacks import Steps, build, generate
from tests.matrix.test_depth import at_depth
from tests.matrix.test_equal_tokens import MAX_MODEL_LEN, PAGED, POOLS, STACKS, pairs
from tests.models import NEW_TOKENS, PROMPTS, VOCAB, reference_tokens, tiny
from tests.tensor_rig import TensorRig, logits_after, make_kv

FAMILY = "llama_gqa"
WANTED: tuple[StructuredOutputsParams | None, ...] = (
    StructuredOutputsParams(regex="[a-z]{5,40}[0-9]{2}"),
    None,
    StructuredOutputsParams(choice=("yes, indeed", "no, never", "perhaps, some day")),
    StructuredOutputsParams(json={"type": "array", "items": {"enum": [1, "two", None]}, "minItems": 2}, disable_any_whitespace=True),
    None,
    StructuredOutputsParams(grammar='start: "(" start ")" | /[xyz]/ start | "."'),
)
PARAMS = [SamplingParams(temperature=0, max_tokens=NEW_TOKENS, structured_outputs=wanted) for wanted in WANTED]
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(Tokenizer.from_folder(tiny(FAMILY)), vocab_size=VOCAB)
    yield made
    made.close()


@functools.cache
def expected(compiler: GrammarCompiler) -> list[tuple[Tokens, str]]:
    """Tokens and finish reason of each prompt."""
    folder = tiny(FAMILY)
    made: list[tuple[Tokens, str]] = []
    for prompt, wanted, free in zip(PROMPTS, WANTED, reference_tokens(folder, PROMPTS, NEW_TOKENS), strict=True):
        if wanted is None:
            made.append((free, "length"))
            continue
        matcher, output, ended = compiler.compile(wanted).matcher(), list[int](), False
        while not ended and len(output) < NEW_TOKENS:
            allowed = np.unpackbits(next_tokens([matcher])[0].view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            logits = logits_after(folder, (*prompt, *output)).numpy()
            output.append(int(np.where(allowed, logits, -np.inf).argmax()))
            ended = matcher.accept(output[-1:])
        made.append((tuple(output), "stop" if ended else "length"))
    return made


def answers(llm: LLM, *, together: bool) -> list[tuple[Tokens, str | None]]:
    groups = [range(len(PROMPTS))] if together else [[index] for index in range(len(PROMPTS))]
    outputs = [one for group in groups for one in generate(llm, [PROMPTS[i] for i in group], [PARAMS[i] for i in group])]
    return [(tuple(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]


def test_what_is_expected_tells_something(compiler: GrammarCompiler) -> None:
    """Some end by their grammar, some by their length, and no structured output is what the model would say by itself."""
    free = reference_tokens(tiny(FAMILY), PROMPTS, NEW_TOKENS)
    assert {reason for _, reason in expected(compiler)} == {"stop", "length"}
    assert [made == alone for (made, _), alone in zip(expected(compiler), free, strict=True)] == [wanted is None for wanted in WANTED]


@pytest.mark.parametrize(("name", "company", "pool"), pairs(["alone", "batched"], list(POOLS)))
def test_the_same_tokens_under_every_stack(name: str, company: str, pool: str, compiler: GrammarCompiler) -> None:
    """Alone and beside free requests, with ample room and preempted all the time."""
    steps = Steps()
    options = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": POOLS[pool], "max_num_seqs": len(PROMPTS), "block_size": 4}
    with LLM.from_built(build(tiny(FAMILY), STACKS[name], **options)) as llm:
        llm.engine.observers.add(steps)
        llm.engine.grammars = compiler  # its own would compile the same again
        assert answers(llm, together=company == "batched") == expected(compiler)
        usage = llm.engine.kv.usage()
        assert usage.filled == usage.held == 0
    if (company, pool) == ("batched", "tiny") and STACKS[name].scheduler.name != "static" and STACKS[name].allocator.name in PAGED:
        assert steps.preemptions > 0


@pytest.mark.parametrize("allocator", ["contiguous", "paged"])
def test_two_steps_in_flight(allocator: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a grammar waits for its token before the next mask is made; its free neighbours do not."""
    name = next(name for name, stack in STACKS.items() if stack.allocator.name == allocator and stack.kernel.name == "sdpa")
    monkeypatch.setattr("tests.matrix.test_depth.FAMILY_OF", dict.fromkeys(STACKS, FAMILY))
    with at_depth(2, name, "ample") as llm:
        llm.engine.grammars = compiler
        assert answers(llm, together=True) == expected(compiler)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_failed_steps_and_preemption_leave_the_matchers_alone(preemption: str, compiler: GrammarCompiler) -> None:
    """A step that is rolled back and repeated, a request that is computed again: each matcher has taken each token once."""
    fails = {0, 3, 4, 9, 14}
    tokenizer = Tokenizer.from_folder(tiny(FAMILY))
    rig = TensorRig(make_kv("paged-4", 96, host=160), preemption=preemption, wrap=failing(fails, half=True), tokenizer=tokenizer)
    rig.engine.grammars = compiler
    requests = [rig.add(prompt, NEW_TOKENS, structured_outputs=wanted) for prompt, wanted in zip(PROMPTS, WANTED, strict=True)]
    assert rig.finish(failure=Broken) == len(fails)
    assert [tuple(rig.tokens(request)[0]) for request in requests] == [tokens for tokens, _ in expected(compiler)]
    assert sum(report.num_preempted for report in rig.reports) > 0

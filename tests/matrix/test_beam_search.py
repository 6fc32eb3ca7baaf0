"""Beam search equals transformers' `generate(num_beams=k, num_return_sequences=k)`: token for token, score for score, in fp32.

Over widths, length penalties, kinds of early stopping, stop ids and lengths; under every stack that runs; beside ordinary requests; cold
and warm; in pieces; preempted, in a pool that holds the beams only shared. Unwritten KV is NaN, invariants are checked after each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence as Seq
from typing import Any

import pytest
from allpairspy import AllPairs

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.engine import Engine
from octavo.core.outputs import RequestOutput
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.plugins.schedulers.chunked import CHUNKED, Chunked
from tests.matrix.stacks import Steps, build
from tests.matrix.test_equal_tokens import STACKS, pairs
from tests.models import FAMILIES, PROMPTS, VOCAB, reference_beams, reference_tokens, tiny
from tests.tensor_rig import TensorRig, make_kv

TOLERANCE = 1e-4
WIDTHS = [1, 2, 3, 4, 8, 16]
PENALTIES = [-1.0, 0.0, 0.7, 1.0, 2.5]
EARLY: list[Any] = [False, True, "never"]
STOPS = {"none": (), "few": tuple(range(5, VOCAB, 64)), "many": tuple(range(1, VOCAB, 8))}
LENGTHS = [1, 6, 14]
DEFAULT = "chunked + prefix + sdpa + torch + llama"
FAMILY_OF = {name: FAMILIES[number % len(FAMILIES)] for number, name in enumerate(STACKS)}


def check(folder: Any, prompt: Seq[int], params: BeamSearchParams, answer: RequestOutput) -> None:
    """Ids, order, scores and reasons are those of transformers."""
    expected = reference_beams(folder, tuple(prompt), params)
    assert [output.token_ids for output in answer.outputs] == [tokens for tokens, _ in expected], params
    for output, (tokens, score) in zip(answer.outputs, expected, strict=True):
        assert output.score is not None and output.cumulative_logprob is not None
        assert output.score == pytest.approx(output.cumulative_logprob / len(tokens) ** params.length_penalty, rel=1e-12)
        if score is not None:
            assert output.score == pytest.approx(score, abs=TOLERANCE, rel=1e-5)
        assert output.finish_reason == ("stop" if tokens[-1] in params.stop_token_ids else "length")
        assert output.stop_reason == (tokens[-1] if output.finish_reason == "stop" else None)


def run(engine: Engine, asked: Seq[tuple[Seq[int], SamplingParams | BeamSearchParams]]) -> list[RequestOutput]:
    """Answers to all these, in one batch."""
    requests = [engine.add_request(prompt, params) for prompt, params in asked]
    answers: dict[str, RequestOutput] = {}
    while engine.has_work:
        answers |= {output.request_id: output for output in engine.step()}
    usage = engine.kv.usage()
    assert usage.filled == usage.held == usage.saved == 0
    return [answers[request.id] for request in requests]


# ------------------------------------------------------------------- the search


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The default stack and an ample pool."""
    with LLM.from_built(build(tiny("llama_gqa"), STACKS[DEFAULT], max_model_len=64, num_kv_slots=1024, max_num_seqs=16)) as llm:
        yield llm


def setting(llm: LLM, prompt: int, *, width: int, length: int, penalty: float, early: Any, stops: str) -> RequestOutput:
    """One search alone, checked."""
    params = BeamSearchParams(width, length, penalty, early, ignore_eos=True, stop_token_ids=STOPS[stops])
    (answer,) = run(llm.engine, [(PROMPTS[prompt], params)])
    check(tiny("llama_gqa"), PROMPTS[prompt], params, answer)
    return answer


@pytest.mark.parametrize(
    ("width", "penalty", "early", "stops", "length", "prompt"),
    [tuple(row) for row in AllPairs([WIDTHS, PENALTIES, EARLY, list(STOPS), LENGTHS, list(range(len(PROMPTS)))])],
)
def test_settings_equal_transformers(llm: LLM, width: int, penalty: float, early: Any, stops: str, length: int, prompt: int) -> None:
    """A pairwise covering array of what a search can be asked for."""
    setting(llm, prompt, width=width, length=length, penalty=penalty, early=early, stops=stops)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", range(1, 17))
@pytest.mark.parametrize("early", EARLY)
def test_every_setting_equals_transformers(llm: LLM, width: int, early: Any) -> None:
    """The whole product, every width."""
    for number, (penalty, stops, length) in enumerate(itertools.product(PENALTIES, STOPS, LENGTHS)):
        setting(llm, number % len(PROMPTS), width=width, length=length, penalty=penalty, early=early, stops=stops)


def test_early_stopping_tells_the_searches_apart(llm: LLM) -> None:
    """Its three kinds, and another penalty, give four answers to one prompt: that all equal transformers says something."""
    kinds = ((1.0, True), (1.0, False), (1.0, "never"), (-1.0, False))
    answers = [setting(llm, 3, width=4, length=14, penalty=penalty, early=early, stops="many") for penalty, early in kinds]
    assert len({tuple(tuple(output.token_ids) for output in answer.outputs) for answer in answers}) == 4


@pytest.mark.parametrize(
    ("name", "width", "penalty", "early", "stops", "company"),
    pairs([2, 5, 16], [-1.0, 1.0, 2.5], EARLY, ["few", "many"], ["alone", "batched"]),
)
def test_every_stack_equals_transformers(name: str, width: int, penalty: float, early: Any, stops: str, company: str) -> None:
    """A pairwise covering array: two searches, cold and then warm, alone or in one batch with greedy requests."""
    folder = tiny(FAMILY_OF[name])
    params = BeamSearchParams(width, 6, penalty, early, ignore_eos=True, stop_token_ids=STOPS[stops])
    plain = SamplingParams(temperature=0, max_tokens=8)
    searches = [(prompt, params) for prompt in (PROMPTS[1], PROMPTS[4])]
    asked = [*searches, (PROMPTS[2], plain), (PROMPTS[5], plain)]
    options = {"max_model_len": 48, "num_kv_slots": 2048, "max_num_seqs": 36, "block_size": 4}
    with LLM.from_built(build(folder, STACKS[name], **options)) as llm:
        for _ in ("cold", "warm"):
            if company == "batched":
                *answers, third, fourth = run(llm.engine, asked)
                found = tuple(tuple(output.outputs[0].token_ids) for output in (third, fourth))
                assert found == reference_tokens(folder, (PROMPTS[2], PROMPTS[5]), 8)
            else:
                answers = [run(llm.engine, [one])[0] for one in searches]
            for (prompt, _), answer in zip(searches, answers, strict=True):
                check(folder, prompt, params, answer)
        if STACKS[name].allocator.name == "prefix":
            assert llm.engine.kv.stats().hit_tokens > 0


# --------------------------------------------------------------- under pressure


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
@pytest.mark.parametrize("budget", [24, 33])
def test_prompts_in_pieces_and_a_pool_that_runs_dry(allocator: str, budget: int) -> None:
    """A budget that holds 16 beams and hardly more, and others that push them out as they grow: nothing changes."""
    folder, steps = tiny("llama_gqa"), Steps()
    plain = (PROMPTS[3], SamplingParams(temperature=0, max_tokens=30))
    searches = [
        (PROMPTS[5], BeamSearchParams(16, 10, ignore_eos=True)),
        (PROMPTS[4], BeamSearchParams(4, 14, ignore_eos=True, stop_token_ids=STOPS["many"])),
    ]
    stack = STACKS[f"chunked + {allocator} + sdpa + torch + llama"]
    options = {"max_model_len": 48, "num_kv_slots": 224, "max_num_seqs": 24, "max_num_batched_tokens": budget, "block_size": 4}
    with LLM.from_built(build(folder, stack, **options)) as llm:
        llm.engine.observers.add(steps)
        for _ in ("cold", "warm"):
            *others, first, second = run(llm.engine, [plain, (PROMPTS[2], plain[1]), (PROMPTS[1], plain[1]), *searches])
            for (prompt, params), answer in zip(searches, (first, second), strict=True):
                check(folder, prompt, params, answer)
            found = tuple(tuple(output.outputs[0].token_ids) for output in others)
            assert found == reference_tokens(folder, (PROMPTS[3], PROMPTS[2], PROMPTS[1]), 30)
            assert first.num_preemptions + second.num_preemptions > 0
    assert max(report.num_tokens for report in steps.reports) <= budget


class Pressed:
    """16 beams of a prompt of 33 tokens, 10 tokens each, in blocks of 4: 8 full blocks of prompt, then 16 times 3. Apart: 16 times 11."""

    WIDTH, NEW, BLOCK = 16, 10, 4
    SHARED = (8 + 16 * 3) * 4
    APART = 16 * 11 * 4

    def __init__(self, *, slots: int, **settings: Any) -> None:
        self.rig = TensorRig(make_kv(f"paged-{self.BLOCK}", slots, host=slots), max_num_seqs=self.WIDTH + 1, **settings)
        self.request: Request = self.rig.add(PROMPTS[5], self.NEW, beam_width=self.WIDTH)

    def preempt(self) -> None:
        """Take it off, as a policy does in a step; what is to be moved goes with the next one."""
        rig = self.rig
        plan = rig.engine.scheduler.plan()
        rig.engine.scheduler.preempt(plan, self.request)
        rig.kv.requeue(plan.build().transfers)

    def check(self) -> None:
        """Nothing was failed, and the answer is that of transformers."""
        assert sum(report.num_failed for report in self.rig.reports) == 0
        assert self.request.beams is not None
        check(self.rig.folder, self.request.prompt, self.request.beams, self.rig.answers[self.request.id])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_sixteen_beams_come_back_where_they_fit_only_shared(after: int, preemption: str) -> None:
    """The pool holds them exactly while they share; preempted after so many steps, they go on to the same result (fault 50)."""
    pressed = Pressed(slots=Pressed.SHARED, preemption=preemption)
    rig = pressed.rig
    assert Pressed.APART > 3 * rig.kv.capacity == 3 * Pressed.SHARED
    for _ in range(after):
        rig.step()
    assert len(pressed.request.sequences) == 16
    pressed.preempt()
    assert rig.kv.usage().filled == rig.kv.usage().held == 0
    rig.finish()
    assert pressed.request.num_preemptions == 1
    assert (rig.moved("out") > 0) == (rig.moved("in") > 0) == (preemption == "swap")
    assert rig.moved("out") <= Pressed.SHARED  # a shared block once
    pressed.check()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_sixteen_beams_make_way_for_who_came_first(preemption: str) -> None:
    """Others grow until the pool is dry: the search is taken off as a whole, waits for its seats, and finishes (fault 50)."""
    options = CHUNKED.options(max_num_seqs=19, max_num_batched_tokens=24, preemption=preemption)
    rig = TensorRig(make_kv("paged-4", Pressed.SHARED, host=400), scheduler=Chunked, options=options, max_num_seqs=19)
    first = [rig.add(PROMPTS[3], 47) for _ in range(3)]
    search = rig.add(PROMPTS[5], Pressed.NEW, beam_width=16)
    rig.finish()
    assert search.num_preemptions > 0 and sum(request.num_preemptions for request in first) == 0
    assert (rig.moved("out") > 0) == (preemption == "swap")
    assert all(rig.tokens(request) == rig.expected(request) for request in first)
    assert search.beams is not None
    check(rig.folder, search.prompt, search.beams, rig.answers[search.id])


def test_a_block_less_is_refused() -> None:
    """The pool above is exact: what can never fit is refused when it is added."""
    with pytest.raises(Exception, match=r"can never fit the KV pool: 16 x \(33 prompt \+ 10 output tokens\), the pool has 220 slots"):
        Pressed(slots=Pressed.SHARED - 4)

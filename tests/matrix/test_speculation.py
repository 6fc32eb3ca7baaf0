"""Speculative decoding on tensors: tokens and distributions are those without drafts, in fewer steps where the text repeats itself.

The engines are made from settings, over every scheduler, allocator and kernel pairwise. Unwritten KV is NaN, and invariants are checked
after each step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from allpairspy import AllPairs

from octavo.bench.run_totals import RunTotals
from octavo.core.outputs import RequestOutput
from octavo.core.request import Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.plugins.schedulers.continuous import ContinuousOptions
from tests.matrix.stacks import build, generate, stack_reports
from tests.models import PROMPTS, VOCAB, looping, reference_gap, reference_tokens, tiny
from tests.tensor_rig import MAX_NUM_SEQS, TensorRig, logits_after, make_kv

NEW = 24
MAX_MODEL_LEN = 64
LOOPS = tuple(tuple(([5, 9, 33, 7] * 12)[:length]) for length in (1, 8, 16, 17, 33))
STACKS = {str(report.stack): report.stack for report in stack_reports(looping()) if report.runs and report.stack.model.name == "llama"}
LOOKUPS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 4},
    {"num_speculative_tokens": 7, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    {"num_speculative_tokens": 1, "prompt_lookup_max": 1, "prompt_lookup_min": 1},
]
EAGER = LOOKUPS[1]
"""Guesses as often as it can, and often in vain."""


def run(
    name: str, prompts: Seq[Seq[int]], params: SamplingParams | list[SamplingParams], lookup: dict[str, Any] | None, **options: Any
) -> tuple[list[RequestOutput], RunTotals]:
    """All prompts in a batch, twice: a prefix cache is warm then. Nothing may be held afterwards."""
    totals = RunTotals()
    given = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": 1024, "max_num_seqs": 8} | options
    folder = given.pop("folder", looping())
    with LLM.from_built(build(folder, STACKS[name], **given, **({"speculative_config": lookup} if lookup else {}))) as llm:
        llm.engine.observers.add(totals)
        first, second = (generate(llm, prompts, params) for _ in range(2))
        usage = llm.engine.kv.usage()
        assert usage.filled == usage.held == 0
    assert [tokens(output) for output in first] == [tokens(output) for output in second]
    return first, totals


def tokens(output: RequestOutput) -> list[tuple[list[int], str, str | None]]:
    return [(o.token_ids, o.text, o.finish_reason) for o in output.outputs]


AXES: list[list[Any]] = [list(STACKS), ["loops", "random"], [1024, MAX_MODEL_LEN], [1, 4, 16], [None, 8, 13], LOOKUPS]


@pytest.mark.parametrize(("name", "text", "slots", "block_size", "budget", "lookup"), list(AllPairs(AXES)))
def test_greedy_tokens_equal_transformers(
    name: str, text: str, slots: int, block_size: int, budget: int | None, lookup: dict[str, Any]
) -> None:
    """Repetitive text takes fewer steps, random text costs rejected drafts, and no token changes: in pools that preempt, budgets that
    leave no room for drafts in some steps, and across the edges of blocks."""
    folder, prompts = (looping(), LOOPS) if text == "loops" else (tiny("llama_gqa"), PROMPTS)
    options: dict[str, Any] = {"folder": folder, "num_kv_slots": slots, "block_size": block_size}
    if budget and STACKS[name].scheduler.plugin.chunking:
        options["max_num_batched_tokens"] = budget
    params = SamplingParams(temperature=0, max_tokens=NEW)
    outputs, totals = run(name, prompts, params, lookup, **options)
    assert tuple(tuple(output.outputs[0].token_ids) for output in outputs) == reference_tokens(folder, prompts, NEW)
    if text == "loops":
        assert totals.acceptance > 0.5
        plain = run(name, prompts, params, None, **options)[1]
        assert totals.steps < plain.steps
    elif lookup is EAGER:
        assert totals.drafted > totals.accepted


def test_the_loops_are_no_ties() -> None:
    """What the above rests on: the likeliest tokens are clearly apart."""
    assert reference_gap(looping(), LOOPS, NEW) > 1e-3


CONTINUOUS = "continuous + paged + sdpa + torch + llama"
CACHING = "chunked + prefix + sdpa + torch + llama"


@pytest.mark.parametrize("name", [CONTINUOUS, CACHING])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.1},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 0.2, "top_p": 0.7, "n": 3},
        {"temperature": 0.1, "min_p": 0.05, "min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 7))},
        {"temperature": 0.1, "frequency_penalty": 0.5},
    ],
    ids=["plain", "top-k", "top-p, n", "min-p, stop ids", "penalty"],
)
def test_sampled_tokens_are_the_same_ones(name: str, params: dict[str, Any]) -> None:
    """A draw is a function of seed, sample and position, so drafts change no sampled token either; penalties get no drafts."""
    each = [SamplingParams(seed=number, max_tokens=NEW, **params) for number in range(len(LOOPS))]
    plain, _ = run(name, LOOPS, each, None)
    drafted, totals = run(name, LOOPS, each, EAGER)
    assert [tokens(output) for output in drafted] == [tokens(output) for output in plain]
    assert (totals.drafted > 0) == ("frequency_penalty" not in params)
    assert (totals.accepted > 0) == ("frequency_penalty" not in params)


@pytest.mark.parametrize("name", [CONTINUOUS, CACHING])
def test_log_probabilities_are_the_same(name: str) -> None:
    """Of every accepted token and of the prompt's, with as many likeliest ones as were asked for."""
    params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=3, prompt_logprobs=2)
    plain, _ = run(name, LOOPS, params, None)
    drafted, totals = run(name, LOOPS, params, EAGER)
    assert totals.acceptance > 0.5
    for one, other in zip(plain, drafted, strict=True):
        ours, theirs = ([*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])] for output in (other, one))
        assert len(ours) == len(one.prompt_token_ids) - 1 + NEW
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine is not None and yours is not None and list(mine) == list(yours)
            assert [entry.rank for entry in mine.values()] == [entry.rank for entry in yours.values()]
            assert [e.logprob for e in mine.values()] == pytest.approx([e.logprob for e in yours.values()], abs=1e-4)
        assert other.outputs[0].cumulative_logprob == pytest.approx(one.outputs[0].cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("name", [CONTINUOUS, CACHING])
def test_ends_within_accepted_drafts(name: str) -> None:
    """A stop id, a stop string or the length, met among drafts that were right: what follows is dropped, wherever in a draft it lies."""
    (answer,) = reference_tokens(looping(), (LOOPS[2],), NEW)
    plain, _ = run(name, [LOOPS[2]], SamplingParams(temperature=0, max_tokens=NEW), None)
    text = plain[0].outputs[0].text
    params = [SamplingParams(temperature=0, max_tokens=length) for length in range(1, 12)]
    params += [SamplingParams(temperature=0, max_tokens=NEW, stop_token_ids=[answer[0]], min_tokens=least) for least in range(1, 9)]
    params += [SamplingParams(temperature=0, max_tokens=NEW, stop=[text[at : at + 2]], min_tokens=at % 5) for at in range(0, 12, 2)]
    prompts = [LOOPS[2]] * len(params)
    without, _ = run(name, prompts, params, None)
    drafted, totals = run(name, prompts, params, LOOKUPS[0])
    assert [tokens(output) for output in drafted] == [tokens(output) for output in without]
    assert totals.accepted > 0
    assert {output.outputs[0].finish_reason for output in drafted} == {"stop", "length"}


PER_SEED = {"temperature": 1.4, "top_k": 4}
SEEDS = 1200


def closed_form(prefix: Seq[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[V] what transformers' logits say of the next token under these settings."""
    logits = logits_after(looping(), tuple(prefix)).double() / PER_SEED["temperature"]
    kept = logits >= logits.topk(int(PER_SEED["top_k"])).values[-1]
    return torch.softmax(logits.where(kept, float("-inf")), 0).numpy()


def p_value(counts: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]) -> float:
    """Of the chi-square test; 0 where something impossible was drawn."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible] * counts.sum()
    assert expected.min() >= 5, "too few draws"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((possible.sum() - 1) / 2), torch.tensor(statistic / 2)))


def test_the_distribution_at_drafted_positions() -> None:
    """Over 1,200 seeds, the token at the first drafted position is distributed as without drafts, and so is the one behind an accepted
    draft: chi-square against the closed form."""
    prompt = LOOPS[1]
    guess = int(closed_form(prompt).argsort()[-2])
    options = ContinuousOptions(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=256)
    rig = TensorRig(make_kv("paged-4", 512), model=looping(), options=options, proposer=lambda sequence: [guess], debug=False)
    drawn = []
    for start in range(0, SEEDS, MAX_NUM_SEQS):
        requests = [rig.add(prompt, 2, seed=seed, **PER_SEED) for seed in range(start, start + MAX_NUM_SEQS)]
        rig.finish()
        drawn += [rig.tokens(request)[0] for request in requests]
    assert all(chunk.drafts == (guess,) for plan in rig.plans for chunk in plan.chunks if chunk.start == 0)
    behind = [row[1] for row in drawn if row[0] == guess]
    for counted, expected in ((np.array(drawn)[:, 0], closed_form(prompt)), (np.array(behind), closed_form((*prompt, guess)))):
        assert p_value(np.bincount(counted, minlength=VOCAB), expected) > 1e-3


def test_no_guess_is_asked_for_where_none_helps() -> None:
    """Requests whose next tokens depend on the output, and the last token of an answer."""
    asked: list[Sequence] = []

    def propose(sequence: Sequence) -> list[int]:
        asked.append(sequence)
        return [1]

    rig = TensorRig(make_kv("paged-4", 512), proposer=propose)
    rig.add(PROMPTS[2], 6, repetition_penalty=1.2)
    rig.add(PROMPTS[2], 1)
    rig.add(PROMPTS[2], 6, beam_width=2)
    rig.finish()
    assert not asked

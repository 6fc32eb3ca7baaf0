"""Every decoding feature under every stack: one table of what a request may ask for, and its answer is the same wherever it runs.

The answer to compare with comes from the plainest stack, one request at a time, in an ample pool; what it must be, other tests ask other
judges. Here each feature meets each stack alone and in the company of all the others, cold and warm, in an ample pool and in one that
preempts, with whole prompts and with prompts in pieces, with drafts and without: a pairwise covering array.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.text.tokenizer import Tokenizer
from octavo.llm import LLM
from tests.matrix.stacks import Steps, build, generate
from tests.matrix.test_equal_tokens import MAX_MODEL_LEN, STACKS, chunking, pairs
from tests.models import PROMPTS, reference_tokens, tiny

FOLDER = tiny("llama_gqa")
PLAIN = "continuous + contiguous + naive + torch + llama"
NEW = 10
PROMPT, OTHER = PROMPTS[2], PROMPTS[4]  # of 11 and 17 tokens: the first is in no block of 16, the second one more than one
GREEDY = reference_tokens(FOLDER, PROMPTS, NEW)[2]
WORDS = [Tokenizer.from_folder(FOLDER).decode_token(token) for token in GREEDY[:3]]


def _not_every_seventh(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Which tokens are left out depends on the last one."""
    logits[(output[-1] if output else GREEDY[0]) % 7 :: 7] -= 50.0
    return logits


def sampled(**settings: Any) -> SamplingParams:
    """Drawn at random, from a seed of its own."""
    return SamplingParams(**{"max_tokens": NEW, "temperature": 1.3, "seed": 11} | settings)


def greedy(**settings: Any) -> SamplingParams:
    """The likeliest tokens."""
    return SamplingParams(**{"max_tokens": NEW, "temperature": 0} | settings)


FEW = (300, 301, 302, 303)  # so that tokens come again
FEATURES: dict[str, SamplingParams | BeamSearchParams] = {
    "greedy": greedy(),
    "temperature": sampled(),
    "filters": sampled(top_k=40, top_p=0.9, min_p=0.001),
    "n": sampled(n=3),
    "best_of": sampled(n=2, best_of=3),
    "presence and frequency": sampled(presence_penalty=2.0, frequency_penalty=2.0, allowed_token_ids=FEW),
    "repetition": sampled(repetition_penalty=1.4),
    "penalties of n": sampled(n=2, presence_penalty=1.0, repetition_penalty=1.2),
    "logit_bias": greedy(logit_bias={GREEDY[0]: -100.0, GREEDY[3]: 100.0}),
    "allowed_token_ids": sampled(allowed_token_ids=FEW),
    "bad_words": greedy(bad_words=WORDS),
    "logits_processors": greedy(logits_processors=[_not_every_seventh]),
    "stop": greedy(stop=WORDS[2]),
    "stop, kept": greedy(stop=WORDS[2], include_stop_str_in_output=True),
    "stop_token_ids": greedy(stop_token_ids=[GREEDY[4]]),
    "min_tokens": greedy(stop_token_ids=[GREEDY[4]], min_tokens=6),
    "logprobs": sampled(logprobs=3),
    "logprobs of n": sampled(n=2, logprobs=2),
    "prompt_logprobs": greedy(prompt_logprobs=2, logprobs=0),
    "regex": greedy(structured_outputs={"regex": "[a-z]{3}[0-9]{2}"}),
    "choice of n": sampled(n=2, structured_outputs={"choice": ["yes", "no"]}),
    "json": greedy(
        structured_outputs={"json": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}, "disable_any_whitespace": True}
    ),
    "grammar": greedy(structured_outputs={"grammar": 'start: "(" start ")" | /[xyz]/ start | "."'}),
    "truncated": greedy(truncate_prompt_tokens=5),
    "salted": greedy(cache_salt="of one user"),
    "beams": BeamSearchParams(beam_width=3, max_tokens=NEW),
    "beams that end": BeamSearchParams(beam_width=2, max_tokens=NEW, stop_token_ids=[GREEDY[1], GREEDY[3]], early_stopping=True),
}
GROUPS = [list(FEATURES)[number::4] for number in range(4)]  # unlike ones together
DRAFTS = {"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
POOLS = {"ample": 1024, "tiny": MAX_MODEL_LEN}
AXES: list[list[Any]] = [[0, 1, 2, 3], ["alone", "in company"], list(POOLS), [1, 4, 16], [None, 8, 13], [False, True]]


def told(output: RequestOutput) -> list[Any]:
    """All that a user is told of an answer."""
    return [[_told(one) for one in output.outputs], _plain(output.prompt_logprobs)]


def _told(one: CompletionOutput) -> tuple[Any, ...]:
    return one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason, one.cumulative_logprob, _plain(one.logprobs)


def _plain(entries: Any) -> Any:
    if entries is None:
        return None
    return [entry and {token: (value.logprob, value.rank) for token, value in entry.items()} for entry in entries]


def same(one: Any, other: Any) -> bool:
    """Equal, numbers as far as fp32 keeps them."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def answers(llm: LLM, asked: Seq[str], *, together: bool) -> dict[str, list[Any]]:
    """What each of these features answers to the prompt."""
    engine, found = llm.engine, dict[str, RequestOutput]()
    for group in [asked] if together else [[name] for name in asked]:
        ids = {engine.add_request(PROMPT, FEATURES[name]).id: name for name in group}
        while engine.has_work:
            for output in engine.step():
                found[ids[output.request_id]] = output
    return {name: told(found[name]) for name in asked}


@functools.cache
def expected(name: str) -> list[Any]:
    """On the plainest stack, alone."""
    with LLM.from_built(build(FOLDER, STACKS[PLAIN], max_model_len=MAX_MODEL_LEN, num_kv_slots=1024, max_num_seqs=8)) as llm:
        return answers(llm, [name], together=False)[name]


def check(stack: str, asked: Seq[str], company: str, pool: str, block_size: int, budget: int | None, drafts: bool) -> Steps:
    """Cold and then warm, the answers are the expected ones, and nothing is held afterwards."""
    slots = POOLS[pool]
    if STACKS[stack].allocator.name == "contiguous":
        slots = max(slots, 3 * MAX_MODEL_LEN)  # each sample has a whole region
    elif block_size == 16:
        slots = max(slots, 3 * 32)  # each sample has two blocks
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": slots, "max_num_seqs": 8, "block_size": block_size}
    if budget and chunking(stack):
        options["max_num_batched_tokens"] = budget
    if drafts:
        options["speculative_config"] = DRAFTS
    steps = Steps()
    with LLM.from_built(build(FOLDER, STACKS[stack], **options)) as llm:
        llm.engine.observers.add(steps)
        generate(llm, [OTHER], greedy())  # somebody who has come and gone
        for _ in ("cold", "warm"):
            for name, answer in answers(llm, asked, together=company == "in company").items():
                assert same(answer, expected(name)), (name, answer, expected(name))
            usage = llm.engine.kv.usage()
            assert usage.filled == usage.held == 0
    return steps


@pytest.mark.parametrize(("stack", "group", "company", "pool", "block_size", "budget", "drafts"), pairs(*AXES))
def test_answers_are_the_same(stack: str, group: int, company: str, pool: str, block_size: int, budget: int | None, drafts: bool) -> None:
    """Each feature under each stack, and a pairwise covering array of all else."""
    check(stack, GROUPS[group], company, pool, block_size, budget, drafts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stack", STACKS)
def test_answers_are_the_same_all_together(stack: str) -> None:
    """All features in one engine at once, where most can go wrong."""
    for pool in POOLS:
        check(stack, list(FEATURES), "in company", pool, 4, 8, True)


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_the_tiny_pool_preempts(allocator: str) -> None:
    """The pool of these tests runs dry for some, or they would show nothing."""
    stack = f"chunked + {allocator} + sdpa + torch + llama"
    assert sum(check(stack, group, "in company", "tiny", 4, 13, False).preemptions for group in GROUPS) > 0


def test_every_feature_changes_something() -> None:
    """No two rows of the table give the same answer, or one would be no test; of the salt, other tests tell."""
    alike = [(one, other) for one, other in itertools.combinations(FEATURES, 2) if same(expected(one), expected(other))]
    assert alike == [("greedy", "salted")]

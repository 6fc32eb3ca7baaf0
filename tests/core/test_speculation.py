"""Prompt lookup proposes what a plain search would, at the cost of the new tokens alone; drafts change no token and leak no slot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from octavo.core.kv import Allocator
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.speculation import PromptLookup
from octavo.core.testing.fake_model import EOS, decode_alone
from octavo.core.testing.random_runs import look_up
from octavo.core.testing.rig import Rig

KV = ("contiguous-request", "paged-1", "paged-4", "prefix-1", "prefix-4", "prefix-16")


def request_of(prompt: list[int], *, n: int = 1) -> Request:
    return Request("r", tuple(prompt), SamplingParams(n=n, max_tokens=500), max_tokens=500, seed=0)


def test_the_longest_and_latest_occurrence_counts() -> None:
    """Longest n first, of equal n-grams the latest; what followed is cut to `num_tokens`."""
    lookup = PromptLookup(num_tokens=2, longest=3, shortest=1)
    (sequence,) = request_of([1, 2, 3, 7, 8, 3, 5, 6, 2, 3, 4, 9, 1, 2, 3]).sequences
    assert lookup(sequence) == [7, 8]  # 1 2 3, though 2 3 and 3 stand later
    (sequence,) = request_of([2, 3, 7, 8, 2, 3, 4, 9, 2, 3]).sequences
    assert lookup(sequence) == [4, 9]
    (sequence,) = request_of([1, 2, 3]).sequences
    assert lookup(sequence) == []


def test_a_loop_goes_on() -> None:
    """An occurrence that reaches the end of the text: the tokens between are a period."""
    lookup = PromptLookup(num_tokens=5, longest=2, shortest=2)
    (sequence,) = request_of([9, 4, 4, 4]).sequences
    assert lookup(sequence) == [4] * 5
    (sequence,) = request_of([9, 5, 6, 7, 5, 6]).sequences
    assert lookup(sequence) == [7, 5, 6, 7, 5]


def test_the_shortest_is_a_limit() -> None:
    """One equal token is no occurrence where two are asked for."""
    (sequence,) = request_of([5, 1, 6, 5]).sequences
    assert PromptLookup(num_tokens=2, longest=4, shortest=2)(sequence) == []
    assert PromptLookup(num_tokens=2, longest=4, shortest=1)(sequence) == [1, 6]


ids = st.integers(1, 4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ids, min_size=1, max_size=20),
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.lists(ids, min_size=1, max_size=5)), max_size=3), max_size=8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_it_proposes_what_a_plain_search_finds(
    prompt: list[int], rounds: list[list[tuple[int, list[int]]]], one: int, other: int, num_tokens: int
) -> None:
    """For three samples of a request that grow at random and are asked at random; one of them may be given another output."""
    longest, shortest = max(one, other), min(one, other)
    lookup = PromptLookup(num_tokens=num_tokens, longest=longest, shortest=shortest)
    request = request_of(prompt, n=3)
    request.sequences += [Sequence(f"r/{i}", request, i) for i in (1, 2)]
    for number, grown in enumerate(rounds):
        for index, tokens in grown:
            request.sequences[index].output += tokens
        if number % 4 == 3:
            request.sequences[1].output = list(request.sequences[0].output)
        for sequence in request.sequences if number % 2 else request.sequences[:2]:
            assert lookup(sequence) == look_up(sequence.tokens(), num_tokens=num_tokens, longest=longest, shortest=shortest)


def test_a_step_costs_its_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2,000 tokens a step reads as few ids as at the beginning, and the prompt is never read again."""
    read: list[int] = []
    tokens = Sequence.tokens

    def counted(sequence: Sequence, start: int = 0, stop: int | None = None) -> list[int]:
        found = tokens(sequence, start, stop)
        read.append(len(found))
        return found

    monkeypatch.setattr(Sequence, "tokens", counted)
    lookup = PromptLookup(num_tokens=4, longest=4, shortest=2)
    request = request_of([i % 7 for i in range(1000)], n=2)
    request.sequences.append(Sequence("r/1", request, 1))
    for index in range(1000):
        for sequence in request.sequences:
            sequence.output.append(index % 5)
            read.clear()
            lookup(sequence)
            assert sum(read) <= 16


def test_what_was_noted_goes_with_the_request() -> None:
    """An engine that runs for weeks keeps nothing of what it answered."""
    lookup = PromptLookup(num_tokens=4, longest=3, shortest=1)
    request = request_of([1, 2, 1, 2])
    lookup(request.sequences[0])
    gone = weakref.ref(request)
    del request
    gc.collect()
    assert gone() is None and len(lookup._prompts) == len(lookup._known) == 0


# ---------------------------------------------------------------------- in an engine


def test_the_step_report_counts_drafts(new_rig: Callable[..., Rig]) -> None:
    """Drafted and accepted tokens of each step; the totals are those of the plans and the answer."""
    rig = new_rig()
    rig.scheduler.proposer = lambda sequence: [*decode_alone(sequence.request)[0][0][len(sequence.output) :][:2], EOS]
    request = rig.add(4, 12)
    rig.finish()
    assert rig.answers(request) == decode_alone(request)
    assert [(r.num_drafted, r.num_accepted) for r in rig.reports] == [(3, 2)] * 3 + [(2, 2)]


def answers_of(sequence: Sequence, at: int) -> list[int]:
    """What unbatched decoding gives from there on, and anything behind its end."""
    return [*decode_alone(sequence.request)[sequence.sample_index][0][at:], 1, 2, 3, 1]


GUESSES: dict[str, Callable[[Sequence], list[int]]] = {
    "right": lambda s: answers_of(s, len(s.output))[:4],
    "wrong": lambda s: [1 + token % 4 for token in answers_of(s, len(s.output))[:4]],
    "half right": lambda s: [*answers_of(s, len(s.output))[:2], 0, 0],
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("kv", KV)
def test_drafts_change_no_answer(policy: Any, stacks: Any, kv: str, guess: str) -> None:
    """All schedulers and allocators, in pools so tiny that those that grow preempt: the answers of unbatched decoding, ended by EOS, a
    stop id or the length within accepted drafts; what follows the end is dropped and every slot comes back."""
    pool: Allocator = stacks.make_kv(kv)
    rig = policy.rig(kv=pool)
    rig.scheduler.proposer = GUESSES[guess]
    requests = []
    for number, more in enumerate([{}, {"n": 3}, {}, {"stream": True}, {}, {"min_tokens": 4}]):
        more |= {"ignore_eos": number % 3 == 0, "stop_token_ids": [3] if number % 2 else [], "seed": number}
        requests.append(rig.add(4 + 3 * number, 6 + 5 * number % 13, **more))
    rig.finish()
    reasons = set()
    for request in requests:
        expected = decode_alone(request)
        reasons |= {reason for _, reason in expected}
        if request.stream:
            pieces = [piece for output in rig.outputs[request.id] for piece in output.outputs]
            assert [token for piece in pieces for token in piece.token_ids] == expected[0][0]
        else:
            assert rig.answers(request) == expected
    assert reasons == {"stop", "length"}
    drafted, accepted = (sum(getattr(r, name) for r in rig.reports) for name in ("num_drafted", "num_accepted"))
    if kv.startswith("paged") and not policy.name.startswith("static"):
        assert sum(report.num_preempted for report in rig.reports) > 0
    assert drafted > 0 and (accepted > 0) == (guess != "wrong")


@pytest.mark.parametrize("kv", ["prefix-1", "prefix-4"])
def test_a_prefix_cache_never_keeps_rejected_drafts(stacks: Any, new_rig: Callable[..., Rig], kv: str) -> None:
    """A prompt that goes on as the wrong guesses did finds what was accepted and no token more."""
    rig = new_rig(kv=stacks.make_kv(kv))
    guesses: list[tuple[int, ...]] = []

    def guess(sequence: Sequence) -> list[int]:
        wrong = [1 + token % 4 for token in answers_of(sequence, len(sequence.output))[:5]]
        guesses.append((*sequence.tokens(), *wrong))
        return wrong

    rig.scheduler.proposer = guess
    first = rig.add(8, 9)
    rig.finish()
    rig.scheduler.proposer = None
    true = (*first.prompt, *rig.answers(first)[0][0])
    for text in guesses:
        request = rig.engine.add_request([*text, 1], SamplingParams(max_tokens=2, ignore_eos=True))
        rig.finish()  # the fake runner raises where a slot holds another token than it should
        common = next((i for i, (a, b) in enumerate(zip(true, text, strict=False)) if a != b), len(text))
        assert request.num_cached is not None and request.num_cached <= common
    assert guesses and rig.kv.stats().hit_tokens > 0

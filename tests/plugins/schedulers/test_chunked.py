"""Chunked prefill: decodes first, then pieces of prompts as far as the step's budget goes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from octavo.core.descriptors import PoolShape
from octavo.core.request import Request
from octavo.core.testing.fake_model import decode_alone
from octavo.core.testing.rig import Rig
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.schedulers.chunked import CHUNKED, ChunkedOptions, octavo_schedulers

MAX_MODEL_LEN = 8300


def rig(*, slots: int = 12000, block_size: int = 16, depth: int = 1, **options: Any) -> Rig:
    pool = PoolShape(num_slots=slots, num_host_slots=0, max_model_len=MAX_MODEL_LEN, max_num_seqs=16)
    kv = PAGED.build(PagedOptions(block_size=block_size), pool)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 2048} | options
    return Rig(CHUNKED.build(ChunkedOptions(**settings), kv), kv, max_model_len=MAX_MODEL_LEN, depth=depth)


def pieces(r: Rig, request: Request) -> list[int]:
    """Lengths of the chunks that the request ran in, up to its first token."""
    lengths = []
    for chunk in (chunk for plan in r.plans for chunk in plan.chunks if chunk.sequence.request is request):
        lengths.append(chunk.length)
        if chunk.samples:
            break
    return lengths


@pytest.mark.parametrize(
    ("budget", "decodes", "lengths"),
    [
        (16384, 0, [8192]),
        (4096, 0, [4096, 4096]),
        (2048, 0, [2048] * 4),
        (4096, 10, [4086, 4086, 20]),
    ],
)
def test_a_prompt_of_8192_is_cut_to_the_budget(budget: int, decodes: int, lengths: list[int]) -> None:
    """1 step at a budget of 16,384, 2 at 4,096, 4 at 2,048; 3 at 4,096 while 10 decodes run (requirements, the articles' examples)."""
    r = rig(max_num_batched_tokens=budget)
    others = [r.add(4, 12) for _ in range(decodes)]
    r.step(2 if decodes else 0)
    prompt = r.add(8192, 2)
    r.finish()
    assert pieces(r, prompt) == lengths
    assert all(r.answers(request) == decode_alone(request) for request in (prompt, *others))


def test_decodes_come_first_and_never_pause() -> None:
    """Whoever decodes has a token in every step, however long the prompts beside it."""
    r = rig(max_num_batched_tokens=16)
    early = [r.add(4, 30) for _ in range(3)]
    r.step()
    r.add(100, 2)
    r.add(50, 2)
    r.step(15)
    for plan in r.plans[1:]:
        assert [chunk.length for chunk in plan.chunks[:3]] == [1, 1, 1]
        assert {chunk.sequence.request for chunk in plan.chunks[:3]} == set(early)
        assert plan.num_tokens <= 16
    assert [plan.num_tokens for plan in r.plans[1:13]] == [16] * 11 + [11]  # no gap until all 150 tokens are done
    r.finish()


def test_prefill_first_lets_decodes_pause() -> None:
    """Steps with prompts run prompts alone; the decodes go on when no prompt is left."""
    r = rig(max_num_batched_tokens=16, mixing="prefill_first")
    r.add(4, 6)
    r.step(2)
    r.add(40, 6)
    r.step(4)
    assert [[chunk.length for chunk in plan.chunks] for plan in r.plans[2:]] == [[16], [16], [8], [1, 1]]
    r.finish()


def test_the_budget_is_spent_on_several_prompts() -> None:
    """What one prompt leaves of the budget is the next one's: no more than one is cut a step, and nobody is admitted for nothing."""
    r = rig(max_num_batched_tokens=16)
    requests = [r.add(length, 2) for length in (10, 10, 10)]
    r.step()
    assert [request.running for request in requests] == [True, True, False]
    r.step()
    assert [[chunk.length for chunk in plan.chunks] for plan in r.plans] == [[10, 6], [1, 4, 10]]
    r.finish()
    assert all(r.answers(request) == decode_alone(request) for request in requests)


def test_a_whole_prompt_must_fit_the_pool() -> None:
    """It is not admitted for its first piece, since it would be preempted for its second (known fault 17)."""
    r = rig(slots=59, block_size=1, max_num_batched_tokens=16)
    first, second = r.add(30, 30), r.add(30, 4)
    r.step(20)
    assert (first.running, second.running) == (True, False)
    r.finish()
    assert first.num_preemptions == second.num_preemptions == 0


@pytest.mark.parametrize("mixing", ["mixed", "prefill_first"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_full_pool_preempts_the_last_and_all_finish(mixing: str, depth: int) -> None:
    """A preempted request computes prompt and outputs again in pieces; the first in rank is never preempted."""
    r = rig(slots=96, block_size=4, max_num_batched_tokens=16, depth=depth, mixing=mixing)
    requests = [r.add(20, 24) for _ in range(4)]
    r.finish()
    assert sum(report.num_preempted for report in r.reports) > 0
    assert requests[0].num_preemptions == 0
    assert all(plan.num_tokens <= 16 for plan in r.plans)
    assert all(r.answers(request) == decode_alone(request) for request in requests)


# ------------------------------------------------------------- prompts in progress


def test_a_long_prompt_runs_at_most_the_threshold() -> None:
    """The rest of the budget goes to the prompts behind it; one of exactly the threshold is not long."""
    r = rig(max_num_batched_tokens=32, long_prefill_token_threshold=10)
    long, exact, other = r.add(25, 2), r.add(10, 2), r.add(30, 2)
    r.finish()
    assert [pieces(r, request) for request in (long, exact, other)] == [[10, 10, 5], [10], [10, 10, 10]]
    assert [chunk.length for chunk in r.plans[0].chunks] == [10, 10, 10]


def test_short_prompts_overtake_long_ones() -> None:
    """One long prompt in progress at a time: the second waits for it, the short ones behind do not."""
    r = rig(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_long_partial_prefills=1)
    first, second, short, late = r.add(20, 2), r.add(20, 2), r.add(6, 2), r.add(8, 2)
    r.finish()
    assert [request.first_scheduled for request in (first, second, short, late)] == [0.0, 2.0, 0.0, 0.0]


def test_a_limit_of_prompts_in_progress() -> None:
    """Only what ends within its step overtakes; what would be cut waits until one in progress is done, and then comes first."""
    r = rig(max_num_batched_tokens=32, long_prefill_token_threshold=20, max_num_partial_prefills=1)
    long, cut, whole = r.add(50, 2), r.add(18, 2), r.add(9, 2)
    r.finish()
    assert [pieces(r, request) for request in (long, cut, whole)] == [[20, 20, 10], [18], [9]]
    assert [request.first_scheduled for request in (long, cut, whole)] == [0.0, 2.0, 0.0]


def test_a_prompt_that_ends_makes_room_in_the_same_step() -> None:
    """In progress is what a step leaves unfinished, so that no budget is lost when one prompt ends and the next is cut."""
    r = rig(max_num_batched_tokens=16, max_num_partial_prefills=1)
    requests = [r.add(24, 2), r.add(24, 2)]
    r.finish()
    assert [pieces(r, request) for request in requests] == [[16, 8], [8, 15, 1]]


def test_who_was_overtaken_is_not_starved() -> None:
    """Short prompts arrive for ever; the long one that waits for another long one starts in the very step that this one ends."""
    r = rig(max_num_batched_tokens=24, max_num_seqs=8, long_prefill_token_threshold=8, max_long_partial_prefills=1)
    first, second = r.add(40, 3), r.add(40, 3)
    for _ in range(20):
        r.add(5, 2)
        r.step()
    assert (first.first_scheduled, second.first_scheduled) == (0.0, 4.0)
    r.finish()


def test_limits_that_do_nothing_are_refused() -> None:
    """A limit of long prompts needs to know which are long, and is not above the limit of all."""
    with pytest.raises(ValidationError, match="max_long_partial_prefills = 1 limits long prompts: set long_prefill_token_threshold too"):
        ChunkedOptions(max_long_partial_prefills=1)
    with pytest.raises(ValidationError, match="max_long_partial_prefills = 3 is more than max_num_partial_prefills = 2"):
        ChunkedOptions(max_long_partial_prefills=3, max_num_partial_prefills=2, long_prefill_token_threshold=8)


def test_descriptor() -> None:
    """The module registers one scheduler that cuts prompts."""
    (plugin,) = octavo_schedulers()
    assert (plugin.name, plugin.chunking, plugin.options) == ("chunked", True, ChunkedOptions)

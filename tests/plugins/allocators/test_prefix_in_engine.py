"""Prefix caching as an engine's user sees it, on the fake runner: which tokens run, what is counted, what is answered."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import RequestError
from octavo.core.kv import Allocator
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.fake_model import decode_alone
from octavo.core.testing.rig import Rig
from octavo.plugins.schedulers.chunked import CHUNKED, ChunkedOptions
from octavo.plugins.schedulers.continuous import CONTINUOUS, ContinuousOptions
from octavo.plugins.schedulers.static import STATIC, StaticOptions
from tests.plugins.allocators.memory import contiguous, prefix

MAX_MODEL_LEN = 64


def rig(kv: Allocator, *, depth: int = 1, **options: Any) -> Rig:
    checked = ContinuousOptions(**{"max_num_seqs": 4, "max_num_batched_tokens": 256, **options})
    return Rig(CONTINUOUS.build(checked, kv), kv, max_model_len=MAX_MODEL_LEN, depth=depth)


def ask(rig: Rig, prompt: list[int], max_tokens: int = 4, **params: Any) -> Request:
    return rig.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=7, **params))


def prompt_tokens(rig: Rig) -> int:
    """Tokens that ran besides those of decoding rows."""
    return sum(chunk.length for plan in rig.plans for chunk in plan.chunks if chunk.start < chunk.sequence.prompt_len)


def text(length: int, number: int = 0) -> list[int]:
    """Texts of one number begin alike."""
    return random.Random(number).choices(range(1, 5), k=length)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_warm_rerun_computes_one_block_a_prompt_at_most(block_size: int) -> None:
    run = rig(prefix(640, block_size=block_size))
    prompts = [text(length, length) for length in (1, 15, 16, 17, 32, 40)]
    cold = [ask(run, prompt) for prompt in prompts]
    run.finish()
    assert prompt_tokens(run) > block_size * len(prompts)
    run.plans.clear()
    warm = [ask(run, prompt) for prompt in prompts]
    run.finish()
    assert prompt_tokens(run) <= block_size * len(prompts)
    assert [run.answers(request) for request in warm] == [run.answers(request) for request in cold]
    assert [request.num_cached for request in warm] == [(len(p) - 1) // block_size * block_size for p in prompts]


def test_equal_prompts_of_one_step_are_both_computed() -> None:
    """Fault 1: a batch that starts together does not read what its members are about to write."""
    kv = prefix(640, block_size=4)
    run = Rig(STATIC.build(StaticOptions(max_num_seqs=4, max_num_batched_tokens=256), kv), kv, max_model_len=MAX_MODEL_LEN)
    twins = [ask(run, text(12)), ask(run, text(12))]
    run.step()
    assert [chunk.length for chunk in run.plans[0].chunks] == [12, 12]
    run.finish()
    assert run.answers(twins[0]) == run.answers(twins[1]) == decode_alone(twins[0])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mixing", ["mixed", "prefill_first"])
@pytest.mark.parametrize(("plugin", "options"), [(CONTINUOUS, {}), (CHUNKED, {}), (CHUNKED, {"max_num_batched_tokens": 8})])
def test_a_common_prefix_that_comes_at_once_is_computed_once(plugin: Any, options: dict[str, Any], mixing: str, depth: int) -> None:
    """Those behind the first wait until it is there, and then run together; a prompt in pieces is waited for to its last common block."""
    kv, common = prefix(640, block_size=4), text(32)
    checked = plugin.options(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "mixing": mixing, **options})
    run = Rig(plugin.build(checked, kv), kv, max_model_len=MAX_MODEL_LEN, depth=depth)
    requests = [ask(run, [*common, *text(3, number)]) for number in range(8)]
    run.finish()
    assert prompt_tokens(run) == 32 + 8 * 3
    assert [request.num_cached for request in requests] == [0, *[32] * 7]
    assert all(run.answers(request) == decode_alone(request) for request in requests)


def test_who_shares_little_does_not_wait() -> None:
    """8 of 20 tokens that come are no reason to let 12 wait; 12 of 20 are, and so are 8 where the step has room for no more than 16."""
    for shared, budget, waits in ((8, 64, False), (12, 64, True), (8, 36, True)):
        run = rig(prefix(640, block_size=4), max_num_batched_tokens=budget)
        ask(run, [*text(shared), *text(20 - shared, 1)])
        other = ask(run, [*text(shared), *text(20 - shared, 2)], max_tokens=1)
        run.step()
        assert (other.first_scheduled is None) == waits, (shared, budget)
        run.finish()


def test_a_limit_of_a_steps_piece_counts() -> None:
    """60 tokens of which 20 are common: where a step runs 8 of a prompt, who waits for the first one loses nothing."""
    kv = prefix(640, block_size=4)
    options = ChunkedOptions(max_num_seqs=4, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    run = Rig(CHUNKED.build(options, kv), kv, max_model_len=MAX_MODEL_LEN)
    first, second = (ask(run, [*text(20), *text(40, number)], max_tokens=2) for number in (1, 2))
    run.finish()
    assert (first.num_cached, second.num_cached) == (0, 20)


def test_a_place_in_progress_stays_free_for_who_waits() -> None:
    """Two prompts may be in progress: one is, one waits for its prefix, and a third one starts when the first one's last piece runs."""
    kv = prefix(640, block_size=4)
    options = ChunkedOptions(max_num_seqs=4, max_num_batched_tokens=32, long_prefill_token_threshold=8, max_num_partial_prefills=2)
    run = Rig(CHUNKED.build(options, kv), kv, max_model_len=MAX_MODEL_LEN)
    first, second, third = ask(run, text(40)), ask(run, text(40)), ask(run, text(40, 3))
    run.step(3)
    assert (first.running, second.running, third.running) == (True, False, False)
    run.finish()
    assert second.num_cached == 36 and third.first_scheduled == 4.0


def test_who_is_waited_for_may_be_preempted() -> None:
    """It computes again, or the one that waited does: nobody waits for ever, and both have their answers."""
    kv = prefix(48, block_size=4)
    run = Rig(CHUNKED.build(ChunkedOptions(max_num_seqs=4, max_num_batched_tokens=6), kv), kv, max_model_len=MAX_MODEL_LEN)
    ahead = ask(run, text(4, 5), max_tokens=30)
    run.step(2)
    both = [ask(run, text(24), max_tokens=8) for _ in range(2)]
    run.finish()
    assert sum(request.num_preemptions for request in both) > 0
    assert all(run.answers(request) == decode_alone(request) for request in (ahead, *both))


def test_nobody_is_waited_for_who_is_gone() -> None:
    """The first is aborted, or loses its blocks to a reset, while the second waits for it: the second computes all by itself."""
    for end in ("abort", "reset"):
        kv = prefix(640, block_size=4)
        run = Rig(CHUNKED.build(ChunkedOptions(max_num_seqs=4, max_num_batched_tokens=8), kv), kv, max_model_len=MAX_MODEL_LEN)
        first, second = ask(run, text(40)), ask(run, text(40))
        run.step(2)
        assert second.first_scheduled is None
        if end == "abort":
            run.engine.abort(first.id)
        else:
            kv.reset()
        run.finish()
        assert second.num_cached == (16 if end == "abort" else 0)
        assert run.answers(second) == decode_alone(second)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_of_a_chat_finds_the_answer_too(depth: int) -> None:
    run = rig(prefix(640, block_size=4), depth=depth)
    first = ask(run, text(10), max_tokens=11)
    run.finish()
    ((answer, _),) = run.answers(first)
    turn = ask(run, [*text(10), *answer, 1, 2, 3])
    run.finish()
    assert turn.num_cached == 20  # the KV of the last token was never written
    assert run.answers(turn) == decode_alone(turn)


def test_a_preempted_request_finds_its_own_blocks_and_that_is_no_hit() -> None:
    """Faults 9 and 18: it goes on where its KV ends, and the hit rate is of first admissions."""
    run = rig(prefix(40, block_size=4))
    first, second = ask(run, text(12), max_tokens=16), ask(run, text(12, 1), max_tokens=16)
    run.finish()
    assert second.num_preemptions > 0
    again = [chunk for plan in run.plans for chunk in plan.chunks if chunk.sequence.request is second and chunk.length > 1]
    assert any(chunk.start >= 8 for chunk in again[1:])
    stats = run.kv.stats()
    assert (stats.queried_tokens, stats.hit_tokens) == (24, 0)
    assert (first.num_cached, second.num_cached) == (0, 0)
    assert run.answers(second) == decode_alone(second)


def test_cached_tokens_are_in_the_answer() -> None:
    run = rig(prefix(640, block_size=4))
    ask(run, text(12))
    run.finish()
    warm = ask(run, [*text(9), 4, 4])
    salted = ask(run, text(12), cache_salt="mine")
    run.finish()
    assert run.outputs[warm.id][-1].num_cached_tokens == 8
    assert run.outputs[salted.id][-1].num_cached_tokens == 0


def test_samples_and_beams_hit_once_and_share() -> None:
    run = rig(prefix(640, block_size=4))
    ask(run, text(12))
    run.finish()
    before = run.kv.stats()
    several = ask(run, text(12), n=3)
    beams = run.engine.add_request(text(12), BeamSearchParams(beam_width=3, max_tokens=4))
    run.finish()
    stats = run.kv.stats()
    assert (stats.queried_tokens - before.queried_tokens, stats.hit_tokens - before.hit_tokens) == (24, 16)
    assert run.answers(several) == decode_alone(several)
    assert run.answers(beams) == decode_alone(beams)


def test_aborts_before_after_and_twice_leave_nothing() -> None:
    """Fault 12: before the first step, in the middle, twice, and after the end."""
    run = rig(prefix(640, block_size=4))
    early, late, over = ask(run, text(12)), ask(run, text(12), max_tokens=9), ask(run, text(5), max_tokens=1)
    run.engine.abort(early.id)
    run.engine.abort(early.id)
    run.step()
    run.step()
    run.engine.abort(late.id)
    run.engine.abort(late.id)
    run.engine.abort(over.id)
    run.finish()
    usage = run.kv.usage()
    assert (usage.filled, usage.held) == (0, 0)
    assert usage.cached + usage.free == run.kv.capacity
    assert run.kv.stats().queried_tokens == 17


def test_an_allocator_may_refuse_at_submit() -> None:
    """`oracle` must know how long the output becomes; nothing is queued."""
    run = rig(contiguous(640, reservation="oracle", max_model_len=MAX_MODEL_LEN))
    with pytest.raises(RequestError, match="must know how long the output becomes"):
        ask(run, text(12))
    assert not run.engine.has_work
    known = ask(run, text(12), known_output_len=4)
    run.finish()
    assert run.answers(known) == decode_alone(known)

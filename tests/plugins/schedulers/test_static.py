"""Static batching: who is in a batch stays until its longest member ends, and nobody joins."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from octavo.core.descriptors import PoolShape
from octavo.core.errors import RequestError
from octavo.core.testing.fake_model import decode_alone
from octavo.core.testing.rig import Rig
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.schedulers.static import STATIC, StaticOptions, octavo_schedulers

MAX_MODEL_LEN = 600


def rig(*, slots: int = 2400, allocator: str = "paged", depth: int = 1, **options: Any) -> Rig:
    pool = PoolShape(num_slots=slots, num_host_slots=0, max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    if allocator == "paged":
        kv = PAGED.build(PagedOptions(block_size=4), pool)
    else:
        kv = CONTIGUOUS.build(ContiguousOptions(reservation="request"), pool)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": MAX_MODEL_LEN} | options
    return Rig(STATIC.build(StaticOptions(**settings), kv), kv, max_model_len=MAX_MODEL_LEN, depth=depth)


def test_short_beside_long_leaves_its_row_idle_480_steps() -> None:
    """20 output tokens batched with 500 leave that row idle for 480 steps (requirements, the articles' examples)."""
    r = rig(max_num_seqs=2)
    r.add(10, 20)
    r.add(10, 500)
    waiting = r.add(10, 1)
    r.finish(600)
    batch = r.reports[:500]
    assert [report.idle_rows for report in batch] == [0] * 20 + [1] * 480
    assert sum(report.idle_rows for report in batch) == 480
    assert waiting.first_scheduled == 500.0  # nobody joined meanwhile


def test_dead_rows_are_skipped_or_computed() -> None:
    """Idle rows are counted either way; only `dead_rows = compute` asks the runner to compute them."""
    for choice, dead in (("skip", 0), ("compute", 1)):
        r = rig(max_num_seqs=2, dead_rows=choice)
        r.add(4, 1)
        r.add(4, 3)
        r.finish()
        assert [plan.dead_rows for plan in r.plans] == [0, dead, dead]
        assert [plan.idle_rows for plan in r.plans] == [0, 1, 1]


@pytest.mark.parametrize(("release", "held_between"), [("batch", 16), ("request", 8)])
def test_kv_of_an_ended_member_goes_with_the_batch_or_at_once(release: str, held_between: int) -> None:
    """`release = batch` keeps the ended member's blocks until the batch is over, `request` gives them back at once."""
    r = rig(max_num_seqs=2, release=release)
    r.add(7, 2)
    r.add(4, 5)
    r.step(3)
    usage = r.kv.usage()
    assert usage.filled + usage.held == held_between
    r.finish()


def test_seats_are_reserved_to_their_known_end() -> None:
    """At admission all positions up to the end are held: prompt + max_tokens - 1, or the known output length where there is one."""
    r = rig(max_num_seqs=2)
    r.add(8, 40)
    r.add(8, 40, known_output_len=5)
    r.step()
    usage = r.kv.usage()
    assert usage.filled + usage.held == 48 + 12


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_a_batch_never_preempts_itself(allocator: str) -> None:
    """Only as many are admitted as the pool carries to their end; the others wait for the next batch."""
    r = rig(slots=100, allocator=allocator)
    requests = [r.add(10, 20, n=n) for n in (1, 2, 1, 3, 1)]
    r.finish()
    assert sum(report.num_preempted for report in r.reports) == 0
    starts = [request.first_scheduled for request in requests]
    assert starts[0] == starts[1] and len(set(starts)) > 1
    assert all(r.answers(request) == decode_alone(request) for request in requests)


def test_a_batch_runs_its_prompts_first() -> None:
    """Prompts that exceed the budget together run in several steps; members that are done with theirs wait for them."""
    r = rig(max_num_seqs=3, max_num_batched_tokens=600)
    for _ in range(3):
        r.add(250, 3)
    r.finish()
    steps = [(len(plan.chunks), plan.num_tokens, plan.idle_rows) for plan in r.plans]
    assert steps == [(2, 500, 1), (1, 250, 2), (3, 3, 0), (3, 3, 0)]


def test_window_waits_for_a_full_batch() -> None:
    """The batch starts when it is full or when its oldest member has waited `window_s`."""
    r = rig(max_num_seqs=2, window_s=10.0)
    first = r.add(4, 2)
    r.step()
    assert r.engine.wait_until == 10.0 and not r.plans
    r.clock.advance(3.0)
    second = r.add(4, 2)
    r.step()
    assert first.first_scheduled == second.first_scheduled == 4.0
    r.finish()
    late = r.add(4, 2)
    came = r.clock.now()
    r.finish()
    assert late.first_scheduled == came + 10.0


def test_window_ends_when_the_pool_is_full() -> None:
    """Waiting longer would not let more requests into the batch."""
    r = rig(slots=60, window_s=100.0)
    r.add(10, 20)
    r.add(10, 20)
    r.add(10, 20)
    r.step()
    assert len(r.plans[0].chunks) == 1
    r.finish()


def test_batch_size_bounds_a_batch() -> None:
    """`batch_size` is a limit of its own, at most `max_num_seqs`; what it can never hold is refused."""
    r = rig(max_num_seqs=4, batch_size=2)
    for _ in range(3):
        r.add(4, 2)
    r.finish()
    assert [len(plan.chunks) for plan in r.plans] == [2, 2, 1, 1]
    with pytest.raises(RequestError, match="the request needs 3 seats, batch_size is 2"):
        r.add(4, 2, n=3)
    with pytest.raises(ValidationError, match="batch_size = 5 is more than max_num_seqs = 4"):
        StaticOptions(max_num_seqs=4, batch_size=5)


def test_aborted_member_leaves_its_row_and_its_kv() -> None:
    """An aborted member's KV goes at once, its row stays empty until the batch ends."""
    r = rig(max_num_seqs=2)
    gone = r.add(8, 30)
    r.add(8, 5)
    r.step(2)
    r.engine.abort(gone.id)
    r.step()
    assert r.kv.usage().filled + r.kv.usage().held == 12
    assert r.plans[-1].idle_rows == 1
    r.finish()


def test_descriptor() -> None:
    """The module registers one scheduler that runs prompts whole."""
    (plugin,) = octavo_schedulers()
    assert (plugin.name, plugin.chunking, plugin.options) == ("static", False, StaticOptions)

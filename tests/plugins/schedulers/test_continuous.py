"""Continuous batching: each step drops the ended and admits the waiting, whole prompts at a time."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.descriptors import PoolShape
from octavo.core.testing.fake_model import decode_alone
from octavo.core.testing.rig import Rig
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.schedulers.continuous import CONTINUOUS, ContinuousOptions, octavo_schedulers

MAX_MODEL_LEN = 600


def rig(*, slots: int = 2400, depth: int = 1, **options: Any) -> Rig:
    pool = PoolShape(num_slots=slots, num_host_slots=0, max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    kv = PAGED.build(PagedOptions(block_size=4), pool)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": MAX_MODEL_LEN} | options
    return Rig(CONTINUOUS.build(ContinuousOptions(**settings), kv), kv, max_model_len=MAX_MODEL_LEN, depth=depth)


def test_no_row_is_idle_while_somebody_waits() -> None:
    """20 output tokens batched with 500: the row is given to whoever waits, in the very next step."""
    r = rig(max_num_seqs=2)
    r.add(10, 500)
    others = [r.add(10, 20) for _ in range(24)]
    r.finish(600)
    assert sum(report.idle_rows for report in r.reports) == 0
    assert [report.num_rows for report in r.reports[:480]] == [2] * 480
    assert [request.first_scheduled for request in others] == [20.0 * number for number in range(24)]


def test_mixed_step_decodes_beside_new_prompts() -> None:
    """A step that admits somebody also decodes the others."""
    r = rig()
    r.add(8, 6)
    r.step(2)
    r.add(8, 6)
    r.step()
    assert [chunk.length for chunk in r.plans[-1].chunks] == [1, 8]
    r.finish()


def test_prefill_first_runs_only_new_prompts() -> None:
    """A step that admits somebody runs prompts only; decodes pause and go on after."""
    r = rig(mixing="prefill_first")
    r.add(8, 6)
    r.step(2)
    r.add(8, 6)
    r.step(2)
    assert [[chunk.length for chunk in plan.chunks] for plan in r.plans[-2:]] == [[8], [1, 1]]
    r.finish()


def test_prompts_are_not_cut() -> None:
    """A prompt that exceeds what is left of the budget waits, and nobody overtakes it."""
    r = rig(max_num_batched_tokens=600)
    r.add(400, 3)
    large = r.add(300, 3)
    small = r.add(10, 3)
    r.finish()
    assert [[chunk.length for chunk in plan.chunks] for plan in r.plans[:2]] == [[400], [1, 300, 10]]
    assert large.first_scheduled == small.first_scheduled == 1.0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_full_pool_preempts_the_last_and_all_finish(depth: int) -> None:
    """When the pool runs dry the latest goes back to the queue; everybody's tokens are those of unbatched decoding."""
    r = rig(slots=48, depth=depth)
    requests = [r.add(8, 24) for _ in range(4)]
    r.finish()
    assert sum(report.num_preempted for report in r.reports) > 0
    assert requests[0].num_preemptions == 0
    assert all(r.answers(request) == decode_alone(request) for request in requests)


def test_rerank_64_run_and_36_wait() -> None:
    """100 requests at max_num_seqs 64: 64 running, 36 waiting (requirements, the articles' examples)."""
    r = rig(slots=4000, max_num_seqs=64, max_num_batched_tokens=2000)
    for _ in range(100):
        r.add(18, 3)
    r.step()
    assert (len(r.scheduler.running), len(r.scheduler.waiting)) == (64, 36)
    r.finish()


def test_descriptor() -> None:
    """The module registers one scheduler that runs prompts whole, the first choice of `auto`."""
    (plugin,) = octavo_schedulers()
    assert (plugin.name, plugin.chunking, plugin.options) == ("continuous", False, ContinuousOptions)

"""When device memory runs out in a step: nothing is lost, less runs at once, and the limits come back."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core import relief
from octavo.core.errors import OutOfMemoryError
from octavo.core.execution import Handle
from octavo.core.plan import BatchPlan
from octavo.core.testing.rig import Rig
from octavo.plugins.schedulers.chunked import CHUNKED
from tests.core.conftest import Policy, make_rig


def short_of_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch, too_much: Any) -> list[int]:
    """Steps for whose plan `too_much` is true run out of memory; returns the rows of all that were tried."""
    submit, rows = rig.runner.submit, list[int]()

    def limited(plan: BatchPlan) -> Handle:
        rows.append(len(plan.chunks))
        if too_much(plan):
            raise OutOfMemoryError("no memory left for this step")
        return submit(plan)

    monkeypatch.setattr(rig.runner, "submit", limited)
    return rows


def test_every_request_is_answered_as_if_memory_had_sufficed(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than two rows fail; the newest requests are preempted and all finish with the tokens they would have had."""
    plain, short = policy.rig(), policy.rig()
    rows = short_of_memory(short, monkeypatch, lambda plan: len(plan.chunks) > 2)
    requests = [(plain.add(5, 6), short.add(5, 6)) for _ in range(5)]
    plain.finish()
    short.finish()
    assert max(rows) > 2, "the case did not occur"
    assert short.engine.relief.count >= 1
    for one, other in requests:
        assert plain.answers(one) == short.answers(other)
    assert short.outputs[requests[0][1].id][-1].num_preemptions == 0, "the oldest was preempted"


def test_a_long_prompt_alone_is_cut_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one request running, the token budget shrinks instead of the seats."""
    monkeypatch.setattr(relief, "SMALLEST_BUDGET", 8)
    rig = make_rig(CHUNKED, max_num_batched_tokens=32)
    short_of_memory(rig, monkeypatch, lambda plan: plan.num_tokens > 9)
    request = rig.add(30, 3)
    rig.finish()
    assert len(rig.answers(request)[0][0]) == 3
    assert max(plan.num_tokens for plan in rig.plans) == 8


def test_what_fits_in_no_way_fails_alone(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose every step runs out of memory is ended with an error; one that comes later is answered."""
    rig = policy.rig()
    bad = rig.add(5, 6)
    short_of_memory(rig, monkeypatch, lambda plan: any(chunk.sequence.request is bad for chunk in plan.chunks))
    rig.step()
    rig.finish()
    assert rig.error(bad) == "its step failed: no memory left for this step"
    good = rig.add(5, 6)
    rig.finish()
    assert len(rig.answers(good)[0][0]) == 6


def test_the_limits_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a calm while the seats double, up to what was set and no further."""
    monkeypatch.setattr(relief, "CALM", 3)
    rig = make_rig()
    full = rig.scheduler.max_num_seqs
    trouble = [True]
    short_of_memory(rig, monkeypatch, lambda plan: len(plan.chunks) > 1 and trouble.pop() if trouble else False)
    for _ in range(4):
        rig.add(4, 30)
    rig.step()
    assert rig.scheduler.max_num_seqs == 2
    rig.step(3)
    assert rig.scheduler.max_num_seqs == 4
    rig.step(20)
    assert rig.scheduler.max_num_seqs == full
    rig.finish()


def test_a_wide_request_is_not_refused_nor_stuck_while_seats_are_few() -> None:
    """n = 4 with two seats left: it waits until nothing else runs, and then runs."""
    rig = make_rig()
    first = rig.add(4, 12)
    rig.step()
    rig.scheduler.max_num_seqs = 2
    wide = rig.add(4, 4, n=4, seed=1)
    rig.step(3)
    assert wide in rig.scheduler.waiting
    rig.finish()
    assert len(rig.answers(wide)) == 4
    assert len(rig.answers(first)[0][0]) == 12

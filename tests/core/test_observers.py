"""Observers are told what happened, can change nothing, and never stop the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.kv import KVUsage
from octavo.core.observers import Observers
from octavo.core.outputs import RequestOutput, StepReport


class Listener:
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.ended: list[RequestOutput] = []

    def octavo_step_finished(self, report: StepReport) -> None:
        self.steps.append(report)

    def octavo_request_finished(self, output: RequestOutput) -> None:
        self.ended.append(output)


class Broken:
    """Like a Prometheus counter that was told to go down."""

    def __init__(self) -> None:
        self.calls = 0

    def octavo_step_finished(self, report: StepReport) -> None:
        self.calls += 1
        raise ValueError("counters can only go up")


def test_one_that_raises_is_logged_and_dropped(new_rig: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """The engine goes on, the others are still told, the broken one is not asked again (known fault 22)."""
    rig, broken, listener = new_rig(), Broken(), Listener()
    rig.engine.observers.add(broken)
    rig.engine.observers.add(listener)
    rig.add(4, 5)
    with caplog.at_level(logging.ERROR, logger="octavo"):
        rig.finish()
    assert (broken.calls, len(listener.steps), len(listener.ended)) == (1, 5, 1)
    assert "failed in step_finished and is dropped" in caplog.text and "counters can only go up" in caplog.text


def test_each_step_is_told_once(new_rig: Callable[..., Any]) -> None:
    """At depth 2 as well: a step is reported when its result is applied, in order, and no step twice."""
    for depth in (1, 2, 3):
        rig = new_rig(depth=depth)
        rig.add(4, 6)
        rig.add(8, 3)
        rig.finish()
        steps = [report.step for report in rig.reports]
        assert steps == sorted(set(steps)) and len(steps) == len(rig.plans)
        assert all("apply" in report.seconds and "schedule" in report.seconds for report in rig.reports)


def test_report_says_what_the_plan_did(new_rig: Callable[..., Any]) -> None:
    """Rows, tokens and lists in numbers, KV usage after the step."""
    rig = new_rig(max_num_seqs=2)
    for _ in range(3):
        rig.add(8, 3)
    rig.step()
    (report,) = rig.reports
    numbers = (report.num_rows, report.num_tokens, report.num_sampled, report.num_running, report.num_waiting, report.time)
    assert numbers == (2, 16, 2, 2, 1, 0.0)
    assert report.usage == KVUsage(filled=16, held=0, external=0, cached=0, free=496)
    rig.finish()


def test_a_step_without_work_is_told_if_somebody_left(new_rig: Callable[..., Any]) -> None:
    """A step that only preempts has no result to wait for, and its preemption is not lost."""
    from octavo.core.plan import BatchPlan
    from octavo.core.scheduling import Scheduler

    class Preempts(Scheduler):
        done = False

        def schedule(self, now: float) -> BatchPlan:
            plan = self.plan()
            if self.running and not self.done:
                self.done = True
                self.preempt(plan, self.running[0])
                return plan.build()
            for request in self.queue():
                self.admit(plan, request)
            for request in list(self.running):
                self.grow(plan, request)
            return plan.build()

    rig = new_rig(Preempts)
    rig.add(4, 3)
    rig.finish()
    assert [(report.num_rows, report.num_preempted) for report in rig.reports] == [(1, 0), (0, 1), (1, 0), (1, 0)]


def test_nobody_is_told_after_remove() -> None:
    """`wanted` follows who listens; unknown methods of an observer are left alone."""
    observers, listener = Observers(), Listener()
    assert not observers.wanted("step_finished")
    observers.add(listener)
    assert observers.wanted("step_finished") and observers.wanted("request_finished") and not observers.wanted("engine_started")
    observers.remove(listener)
    observers.tell("request_finished", None)
    assert not observers.wanted("request_finished") and listener.ended == []


def test_no_report_is_made_for_nobody(new_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a listener a step never asks the allocator for its usage."""
    rig = new_rig()
    rig.engine.debug = False
    rig.engine.observers.remove(rig)
    rig.add(4, 3)
    monkeypatch.setattr(rig.kv, "usage", lambda: pytest.fail("usage was asked for"))
    while rig.engine.has_work:
        rig.engine.step()

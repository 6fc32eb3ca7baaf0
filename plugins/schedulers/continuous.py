"""Continuous batching: each step drops the ended and admits the waiting; prompts run whole.

Iteration-level scheduling as in Orca (Yu et al., OSDI 2022). Needs no torch, imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from octavo.core.descriptors import SchedulerPlugin
from octavo.core.hookspecs import hookimpl
from octavo.core.kv import Allocator
from octavo.core.options import SchedulerOptions
from octavo.core.plan import BatchPlan
from octavo.core.plan_builder import PlanBuilder, Proposer
from octavo.core.scheduling import Scheduler


class ContinuousOptions(SchedulerOptions):
    """Options of the continuous scheduler."""

    mixing: Literal["mixed", "prefill_first"] = Field(
        "mixed", description="a step that admits somebody also decodes the others, or runs only the new prompts while decodes pause"
    )


class Continuous(Scheduler):
    """Who waits at the head of the queue joins as soon as there is a seat, budget for its whole prompt, and KV for it."""

    def __init__(self, options: ContinuousOptions, kv: Allocator, *, proposer: Proposer | None = None) -> None:
        super().__init__(options, kv, proposer=proposer)
        self._mixes = options.mixing == "mixed"

    def schedule(self, now: float) -> BatchPlan:
        """Mixed: decodes, then new prompts. Prefill first: new prompts, decodes only if there are none."""
        plan = self.plan()
        if self._mixes:
            self._go_on(plan)
        for request in self.candidates(plan):
            if not self.admit(plan, request):
                break
            self.grow(plan, request)
        if not self._mixes and not len(plan):
            self._go_on(plan)
        return plan.build()

    def _go_on(self, plan: PlanBuilder) -> None:
        for request in list(self.running):
            self.grow(plan, request)


def _build(options: ContinuousOptions, kv: Allocator) -> Scheduler:
    return Continuous(options, kv)


CONTINUOUS = SchedulerPlugin(
    name="continuous",
    summary="each step drops the ended and admits the waiting; prompts run whole",
    options=ContinuousOptions,
    build=_build,
    chunking=False,
    preference=10,
)


@hookimpl
def octavo_schedulers() -> Iterable[SchedulerPlugin]:
    """This module's scheduler."""
    return [CONTINUOUS]

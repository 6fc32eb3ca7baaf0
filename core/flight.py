"""A step between its planning and its application, and the report of it afterwards.

Must not know: what a policy or an allocator does inside, who reads reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.execution import Handle
from octavo.core.kv import Allocator, BlockEvent
from octavo.core.outputs import StepReport
from octavo.core.plan import BatchPlan
from octavo.core.scheduling import Scheduler
from octavo.core.token_times import TokenTimes


@dataclass(slots=True)
class Flight:
    """A step between its planning and its application."""

    step: int
    plan: BatchPlan
    handle: Handle | None
    started: float
    num_accepted: int = 0  # drafts, known once it is applied
    seconds: dict[str, float] = field(default_factory=dict)


def step_report(
    flight: Flight, *, scheduler: Scheduler, kv: Allocator, events: list[BlockEvent], token_times: TokenTimes, error: str
) -> StepReport:
    """The plan in numbers, and the state of engine and pool after it. `error`: why it was undone."""
    plan, transfers = flight.plan, dict[str, int]()
    _, starts, lengths, _, samples, drafts, *_ = zip(*plan.chunks, strict=True) if plan.chunks else ((),) * 7
    for transfer in plan.transfers:
        transfers[transfer.kind] = transfers.get(transfer.kind, 0) + transfer.count
    return StepReport(
        step=flight.step,
        time=flight.started,
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_rows=len(plan.chunks),
        num_tokens=sum(lengths),
        num_sampled=sum(samples),
        num_drafted=sum(map(len, drafts)),
        num_accepted=flight.num_accepted,
        idle_rows=plan.idle_rows,
        num_preempted=len(plan.preempted),
        num_failed=len(plan.failed),
        transfers=transfers,
        usage=kv.usage(),
        stats=kv.stats(),
        events=tuple(events),
        seconds=flight.seconds,
        starts=starts,
        lengths=lengths,
        first_tokens=() if error else tuple(token_times.firsts),
        token_gaps={} if error else token_times.gaps,
        error=error,
    )

"""A step between its planning and its application, and the report of it afterwards.

Must not know: what a policy or an allocator does inside, who reads reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.execution import Handle
from octavo.core.kv import Allocator, BlockEvent, KVUsage
from octavo.core.observers import Observers
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
    ended: float | None = None  # when it was applied
    num_accepted: int = 0  # drafts, known once it is applied
    seconds: dict[str, float] = field(default_factory=dict)
    usage: KVUsage | None = None  # of the pool, as it was planned, if somebody listened
    num_events: int = 0  # block events since the start that came before it ran


class StepReports:
    """Tells observers of steps. While nobody listens it looks at nothing."""

    def __init__(self, *, scheduler: Scheduler, kv: Allocator, observers: Observers, token_times: TokenTimes) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._observers = observers
        self._token_times = token_times
        self._events: list[BlockEvent] = []  # since the last report, in their order
        self._num_told = 0  # block events that were handed over

    def drain_events(self) -> list[BlockEvent]:
        """Blocks that changed hands and nobody was told of yet."""
        events, self._events = self._events, []
        if self._kv.observed:
            events += self._kv.drain_events()
        self._num_told += len(events)
        return events

    def planned(self, flight: Flight) -> None:
        """The step is about to run: what the pool looks like now."""
        if self._observers.wanted("step_finished"):
            flight.usage = self._kv.usage()
            if self._kv.observed:
                self._events += self._kv.drain_events()
            flight.num_events = self._num_told + len(self._events)

    def tell(self, flight: Flight, *, ended: float, error: str) -> None:
        """The step is over. `error`: why it was undone."""
        before = self._num_told
        events = self.drain_events()
        if self._observers.wanted("step_finished"):
            num_planned = min(max(0, flight.num_events - before), len(events))
            self._observers.tell("step_finished", self._report(flight, events, num_planned, ended=ended, error=error))

    def _report(self, flight: Flight, events: list[BlockEvent], num_planned: int, *, ended: float, error: str) -> StepReport:
        """The plan in numbers, and the state of engine and pool after it."""
        plan, transfers, times, usage = flight.plan, dict[str, int](), self._token_times, self._kv.usage()
        _, starts, lengths, _, samples, drafts, *_ = zip(*plan.chunks, strict=True) if plan.chunks else ((),) * 7
        for transfer in plan.transfers:
            transfers[transfer.kind] = transfers.get(transfer.kind, 0) + transfer.count
        return StepReport(
            step=flight.step,
            time=flight.started,
            end=ended,
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_rows=len(plan.chunks),
            num_tokens=sum(lengths),
            num_sampled=sum(samples),
            num_recomputed=plan.num_recomputed,
            num_drafted=sum(map(len, drafts)),
            num_accepted=flight.num_accepted,
            idle_rows=plan.idle_rows,
            num_preempted=len(plan.preempted),
            num_failed=len(plan.failed),
            transfers=transfers,
            usage=usage,
            usage_running=flight.usage or usage,
            stats=self._kv.stats(),
            events=tuple(events),
            num_events_planned=num_planned,
            seconds=flight.seconds,
            starts=starts,
            lengths=lengths,
            first_tokens=() if error else tuple(times.firsts),
            token_gaps={} if error else times.gaps,
            error=error,
        )

"""`StepLog`: an observer that keeps one line a step, and which blocks changed hands.

Must not know: what is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import mul

from octavo.core.engine import Engine
from octavo.core.kv import BlockEvent, KVStats, KVUsage
from octavo.core.outputs import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One step. Times are seconds after the run's start; `end` is when its tokens could be handed out."""

    step: int
    start: float
    end: float
    seconds: dict[str, float]  # schedule, inputs, forward, sample, apply; measured apart from start and end
    num_waiting: int  # requests, when it was over
    num_running: int
    num_rows: int  # the batch
    num_tokens: int  # planned; each position runs once, whatever becomes of it
    num_sampled: int  # rows from which a token was drawn
    num_recomputed: int  # of num_tokens, those computed before and lost in a preemption
    num_drafted: int  # of num_tokens, guesses that were checked
    num_accepted: int  # of these, right ones
    num_context: int  # positions that the rows attend over, their own included: so many slots are read
    num_pairs: int  # of queries and keys
    idle_rows: int
    num_preempted: int
    num_failed: int
    transfers: dict[str, int]  # slots moved, by kind
    usage: KVUsage  # when it was over; of the last step, when the log ended
    usage_running: KVUsage  # while it ran: planned, and nothing written yet
    stats: KVStats  # counted since the log began
    events: tuple[BlockEvent, ...] = ()
    num_events_planned: int = 0  # the first of `events` came before it ran, the others when its result was applied
    error: str = ""  # why it was undone: nothing came of it

    @property
    def computes_prompt(self) -> bool:
        """A prompt or a piece of one is among its rows: it has more tokens than one a row and the guesses that it checks."""
        return self.num_tokens - self.num_drafted > self.num_rows

    @property
    def num_written(self) -> int:
        """Slots that it wrote for good: rejected guesses are written over."""
        return 0 if self.error else self.num_tokens - self.num_drafted + self.num_accepted


@dataclass(slots=True)
class StepLog:
    """What an engine did in a run. `with log.watching(engine): ...`; read `lines` afterwards."""

    zero: float  # the run's start on the engine's clock
    lines: list[StepLine] = field(default_factory=list)
    before: KVStats = field(default_factory=KVStats)  # what the pool had counted when the log began

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[StepLog]:
        """Keep the engine's steps meanwhile, with block events, unless they are somebody else's already."""
        kv, was = engine.kv, engine.kv.observed
        if not was:
            kv.observed = True
            engine.reports.drain_events()
        self.before = kv.stats()
        engine.observers.add(self)
        try:
            yield self
        finally:
            engine.observers.remove(self)
            if self.lines:  # what requests gave back that ended between steps
                last = self.lines[-1]
                self.lines[-1] = replace(last, events=(*last.events, *engine.reports.drain_events()), usage=kv.usage())
            kv.observed = was

    def octavo_step_finished(self, report: StepReport) -> None:
        """Keep one step."""
        context = sum(report.starts) + report.num_tokens
        pairs = context
        if report.num_tokens > report.num_rows:  # row by row: the first query sees start + 1 keys, the next one more
            pairs = sum(map(mul, report.starts, report.lengths)) + sum(n * (n + 1) // 2 for n in report.lengths)
        self.lines.append(
            StepLine(
                step=report.step,
                start=report.time - self.zero,
                end=report.end - self.zero,
                seconds=dict(report.seconds),
                num_waiting=report.num_waiting,
                num_running=report.num_running,
                num_rows=report.num_rows,
                num_tokens=report.num_tokens,
                num_sampled=report.num_sampled,
                num_recomputed=report.num_recomputed,
                num_drafted=report.num_drafted,
                num_accepted=report.num_accepted,
                num_context=context,
                num_pairs=pairs,
                idle_rows=report.idle_rows,
                num_preempted=report.num_preempted,
                num_failed=report.num_failed,
                transfers=report.transfers,
                usage=report.usage,
                usage_running=report.usage_running,
                stats=_since(self.before, report.stats),
                events=report.events,
                num_events_planned=report.num_events_planned,
                error=report.error,
            )
        )


def _since(before: KVStats, now: KVStats) -> KVStats:
    """What was counted in between."""
    return KVStats(*(getattr(now, field.name) - getattr(before, field.name) for field in fields(KVStats)))

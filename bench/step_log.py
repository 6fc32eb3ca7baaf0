"""`StepLog`: an observer that keeps one line a step, and which blocks changed hands.

Must not know: what is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.kv import BlockEvent, KVStats, KVUsage
from octavo.core.outputs import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One step. Times are seconds after the run's start; `end` is when its tokens could be handed out."""

    step: int
    start: float
    end: float
    seconds: dict[str, float]  # schedule, inputs, forward, sample, apply
    num_waiting: int
    num_running: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    idle_rows: int
    num_preempted: int
    usage: KVUsage
    stats: KVStats
    events: tuple[BlockEvent, ...] = ()
    error: str = ""


@dataclass(slots=True)
class StepLog:
    """Add it to an engine's observers, set the allocator's `observed` for block events, and read `lines` afterwards."""

    zero: float  # the run's start on the engine's clock
    lines: list[StepLine] = field(default_factory=list)

    def octavo_step_finished(self, report: StepReport) -> None:
        """Keep one step."""
        start = report.time - self.zero
        self.lines.append(
            StepLine(
                step=report.step,
                start=start,
                end=start + sum(report.seconds.values()),
                seconds=dict(report.seconds),
                num_waiting=report.num_waiting,
                num_running=report.num_running,
                num_rows=report.num_rows,
                num_tokens=report.num_tokens,
                num_sampled=report.num_sampled,
                idle_rows=report.idle_rows,
                num_preempted=report.num_preempted,
                usage=report.usage,
                stats=report.stats,
                events=report.events,
                error=report.error,
            )
        )

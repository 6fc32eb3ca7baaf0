"""Totals of a run are those of its steps."""

from __future__ import annotations

from typing import Any

from octavo.bench.run_totals import RunTotals
from octavo.core.kv import KVStats, KVUsage
from octavo.core.outputs import StepReport


def report(*, rows: int, filled: int = 0, held: int = 0, cached: int = 0, **numbers: Any) -> StepReport:
    nothing = {
        "step": 0,
        "time": 0.0,
        "end": 0.0,
        "num_waiting": 0,
        "num_running": 0,
        "num_sampled": 0,
        "num_recomputed": 0,
        "num_drafted": 0,
        "num_accepted": 0,
        "num_failed": 0,
        "transfers": {},
        "events": (),
        "num_events_planned": 0,
    }
    counts = {"idle_rows": 0, "num_preempted": 0, "num_tokens": rows, "stats": KVStats(), **numbers}
    usage = KVUsage(filled, held, 0, cached, 100 - filled - held - cached)
    return StepReport(**nothing, num_rows=rows, usage=usage, usage_running=usage, **counts)


def test_steps_are_added_up() -> None:
    """Steps without rows count for preemptions only; the peak is what live sequences hold, cached blocks apart (fault 44)."""
    totals = RunTotals()
    assert totals.mean_batch == 0.0
    for step in (
        report(rows=4, filled=10, held=5, idle_rows=1),
        report(rows=1, filled=12, held=8, cached=60, idle_rows=2),
        report(rows=0, num_preempted=2),
        report(rows=2, filled=1, num_preempted=1),
    ):
        totals.octavo_step_finished(step)
    assert (totals.steps, totals.rows, totals.idle_rows, totals.preemptions, totals.peak_slots) == (3, 7, 3, 3, 20)
    assert totals.mean_batch == 7 / 3

"""`RunTotals`: an observer that adds up the steps of one run."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.outputs import StepReport


@dataclass(slots=True)
class RunTotals:
    """Add it to an engine's observers before the run, read it afterwards."""

    steps: int = 0
    rows: int = 0
    idle_rows: int = 0
    preemptions: int = 0
    peak_slots: int = 0  # granted to live sequences, filled or not

    def octavo_step_finished(self, report: StepReport) -> None:
        """Count one step."""
        self.steps += bool(report.num_rows)
        self.rows += report.num_rows
        self.idle_rows += report.idle_rows
        self.preemptions += report.num_preempted
        self.peak_slots = max(self.peak_slots, report.usage.filled + report.usage.held)

    @property
    def mean_batch(self) -> float:
        """Rows of a step, on average."""
        return self.rows / self.steps if self.steps else 0.0

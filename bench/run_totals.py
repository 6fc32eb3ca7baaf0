"""`RunTotals`: an observer that adds up the steps of one run."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.kv import KVStats
from octavo.core.outputs import StepReport


@dataclass(slots=True)
class RunTotals:
    """Add it to an engine's observers before the run, read it afterwards."""

    steps: int = 0
    rows: int = 0
    idle_rows: int = 0
    preemptions: int = 0
    drafted: int = 0  # tokens guessed by speculative decoding
    accepted: int = 0  # of these, tokens that were right
    peak_slots: int = 0  # granted to live sequences, filled or not
    stats: KVStats = field(default_factory=KVStats)  # of the pool since it was made, as of the last step

    def octavo_step_finished(self, report: StepReport) -> None:
        """Count one step."""
        self.preemptions += report.num_preempted
        if report.error:
            return
        self.steps += bool(report.num_rows)
        self.rows += report.num_rows
        self.idle_rows += report.idle_rows
        self.drafted += report.num_drafted
        self.accepted += report.num_accepted
        self.peak_slots = max(self.peak_slots, report.usage.filled + report.usage.held)
        self.stats = report.stats

    @property
    def mean_batch(self) -> float:
        """Rows of a step, on average."""
        return self.rows / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """The share of guessed tokens that were right; 0 without guesses."""
        return self.accepted / self.drafted if self.drafted else 0.0

"""What an engine does when device memory ran out: less at once, and more again when steps have gone well for a while.

A step that ran out of memory was undone. With half the seats the newest requests are preempted (`Scheduler.plan` does that) and the
step is planned again, smaller; where one request is alone, its prompt is cut into smaller pieces. Must not know: devices, runners.
"""

from __future__ import annotations

import logging

from octavo.core.scheduling import Scheduler

logger = logging.getLogger("octavo")

SMALLEST_BUDGET = 64  # tokens; a smaller step does not need noticeably less
CALM = 256  # steps without trouble after which the limits double, up to what was set


class Relief:
    """The limits of one scheduler, between what was set and what memory allows just now."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full = (scheduler.max_num_seqs, scheduler.budget)
        self._calm = 0
        self.count = 0  # steps that ran out of memory

    def shrink(self) -> bool:
        """Run less at once from now on. False: that is not possible any more."""
        scheduler = self._scheduler
        self.count += 1
        self._calm = 0
        running = sum(request.seats for request in scheduler.running)
        if len(scheduler.running) > 1:
            scheduler.max_num_seqs = max(scheduler.running[0].seats, running // 2)
            logger.warning("a step ran out of memory: %d of %d sequences go on for now", scheduler.max_num_seqs, running)
            return True
        if scheduler.chunking and scheduler.budget > SMALLEST_BUDGET:
            scheduler.budget = max(SMALLEST_BUDGET, scheduler.budget // 2)
            logger.warning("a step of one request ran out of memory: steps have at most %d tokens for now", scheduler.budget)
            return True
        return False

    def went_well(self) -> None:
        """A step was applied."""
        scheduler = self._scheduler
        if (scheduler.max_num_seqs, scheduler.budget) == self._full:
            return
        self._calm += 1
        if self._calm >= CALM:
            self._calm = 0
            seats, budget = self._full
            scheduler.max_num_seqs = min(seats, 2 * scheduler.max_num_seqs)
            scheduler.budget = min(budget, 2 * scheduler.budget)

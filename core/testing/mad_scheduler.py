"""A third-party policy that does legal but senseless things: whatever it does, the tokens must be right and everybody must end."""

from __future__ import annotations

import random
from typing import ClassVar

from octavo.core.kv import Allocator
from octavo.core.options import SchedulerOptions
from octavo.core.plan import BatchPlan
from octavo.core.plan_builder import PlanBuilder
from octavo.core.scheduling import Scheduler


class MadScheduler(Scheduler):
    """Skips, preempts, cuts prompts, ignores refusals, drops what it planned and plans it again, all at random."""

    chunking: ClassVar[bool] = True

    def __init__(self, options: SchedulerOptions, kv: Allocator, *, seed: int) -> None:
        super().__init__(options, kv)
        self._random = random.Random(seed)
        self._limits = [None] if seed % 3 == 0 else [None, 1, 2, 5]

    def schedule(self, now: float) -> BatchPlan:
        """Anything; but if that comes to nothing, the oldest goes on."""
        plan, rng = self.plan(), self._random
        for request in rng.sample(self.running, len(self.running)):
            if not request.running or rng.random() < 0.15:
                continue
            if rng.random() < 0.05 and len(self.running) > 1:
                self.preempt(plan, rng.choice(self.running))
                continue
            if not plan.add(request, rng.choice(self._limits)):
                if rng.random() < 0.5:
                    continue
                self.grow(plan, request)
            if rng.random() < 0.05:
                plan.drop(request)
            if rng.random() < 0.1 and request.running:
                plan.add(request)
        for request in rng.sample(self.waiting, len(self.waiting)):
            if rng.random() < 0.7 and self.admit(plan, request) and rng.random() < 0.7:
                plan.add(request)
        if not len(plan):
            self._least(plan)
        return plan.build()

    def _least(self, plan: PlanBuilder) -> None:
        for request in list(self.running):
            self.grow(plan, request)
        for request in self.queue():
            if self.admit(plan, request):
                self.grow(plan, request)

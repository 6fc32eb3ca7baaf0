"""A scheduler plugin in one file: the shortest waiting prompt goes first."""

from __future__ import annotations

from octavo.core.descriptors import SchedulerPlugin
from octavo.core.hookspecs import hookimpl
from octavo.core.plan import BatchPlan
from octavo.core.scheduling import Scheduler


class ShortestFirst(Scheduler):
    """Short answers come back sooner; a long prompt may wait for as long as shorter ones keep coming."""

    def schedule(self, now: float) -> BatchPlan:
        """Whoever runs goes on; then the shortest prompts that fit."""
        plan = self.plan()
        for request in list(self.running):
            self.grow(plan, request)
        for request in sorted(self.queue(), key=lambda r: len(r.prompt)):
            if self.admit(plan, request):
                self.grow(plan, request)
        return plan.build()


@hookimpl
def octavo_schedulers() -> list[SchedulerPlugin]:
    """This package's scheduler."""
    return [
        SchedulerPlugin(
            name="shortest_first",
            summary="shortest prompt first",
            chunking=False,
            build=lambda options, kv: ShortestFirst(options, kv),
        )
    ]

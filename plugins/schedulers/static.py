"""Static batching: a batch runs until its longest member ends, and nobody joins meanwhile.

The baseline that continuous batching is compared with (Yu et al., Orca, OSDI 2022, section 2): a row whose request has ended stays
empty until the batch is over. All prompts of a batch run first, then all its members decode. Needs no torch, imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from octavo.core.descriptors import SchedulerPlugin
from octavo.core.errors import RequestError
from octavo.core.hookspecs import hookimpl
from octavo.core.kv import Allocator
from octavo.core.options import SchedulerOptions
from octavo.core.plan import BatchPlan
from octavo.core.plan_builder import PlanBuilder, Proposer
from octavo.core.request import Request, Sequence
from octavo.core.scheduling import Scheduler


class StaticOptions(SchedulerOptions):
    """Options of the static scheduler."""

    batch_size: int | None = Field(None, ge=1, description="rows of a batch, at most max_num_seqs; unset: max_num_seqs")
    window_s: float = Field(
        0.0, ge=0, description="seconds that the oldest request waits for the batch to fill; 0: start with who is there"
    )
    release: Literal["batch", "request"] = Field(
        "batch", description="when the KV of an ended member is given back: with the whole batch, or at once"
    )
    dead_rows: Literal["skip", "compute"] = Field(
        "skip", description="rows whose member has ended: left out of a step, or computed for nothing as a padded batch does"
    )

    @model_validator(mode="after")
    def _batch_within_limit(self) -> Self:
        if self.batch_size is not None and self.batch_size > self.max_num_seqs:
            raise ValueError(f"batch_size = {self.batch_size} is more than max_num_seqs = {self.max_num_seqs}")
        return self


class Static(Scheduler):
    """Admits a batch when nothing runs; a batch that was admitted fits the pool to its end and never preempts itself."""

    def __init__(self, options: StaticOptions, kv: Allocator, *, proposer: Proposer | None = None) -> None:
        super().__init__(options, kv, proposer=proposer)
        self._batch_size = options.batch_size or options.max_num_seqs
        self._window = options.window_s
        self._keeps = options.release == "batch"
        self._computes_dead_rows = options.dead_rows == "compute"
        self._kept: list[Sequence] = []  # ended members whose KV stays until the batch is over
        self._rows = 0  # seats of the batch when it started

    def check(self, request: Request) -> None:
        """A batch must have a seat for each of the request's sequences."""
        if request.seats > self._batch_size:
            raise RequestError(f"the request needs {request.seats} seats, batch_size is {self._batch_size}", field="n")
        super().check(request)

    def schedule(self, now: float) -> BatchPlan:
        """Start a batch when nothing runs; then prompts first, decodes after."""
        plan = self.plan()
        if not self.running:
            starts_at = self._starts_at()
            if starts_at > now:
                return plan.build(wait_until=starts_at)
            self._start_batch(plan)
        for request in [r for r in self.running if r.prefilling] or list(self.running):
            self.grow(plan, request)
        idle = self._rows - sum(request.seats for request in self.running if request in plan)
        return plan.build(idle_rows=idle, dead_rows=idle if self._computes_dead_rows else 0)

    def _starts_at(self) -> float:
        """When to start: at once if the batch is full (by seats or by KV), else when the oldest has waited `window_s`."""
        candidates = list(self.queue())
        if not self._window or not candidates:
            return 0.0
        if sum(request.seats for request in candidates) >= self._batch_size or not self.kv.fits(*candidates):
            return 0.0
        return min(request.arrival for request in candidates) + self._window

    def _start_batch(self, plan: PlanBuilder) -> None:
        self._rows = 0
        for request in self.queue():
            if self._rows + request.seats > self._batch_size or not self.kv.fits(*self.running, request):
                break
            if not self.admit(plan, request):
                break
            self._rows += request.seats

    def room(self, sequence: Sequence) -> int:
        """All positions up to the sequence's known end: static batching reserves them at admission."""
        known = sequence.known_output_len
        return sequence.max_positions if known is None else sequence.prompt_len + known - 1

    def finished(self, sequence: Sequence) -> None:
        """Under `release = batch` the KV stays: nobody could use its room before the batch ends."""
        if self._keeps:
            self._kept.append(sequence)
        else:
            self.kv.close(sequence)

    def remove(self, request: Request) -> None:
        """The last member's end is the batch's."""
        super().remove(request)
        if not self.running:
            self.make_room()

    def make_room(self) -> bool:
        """Let go of ended members; False: none was kept."""
        kept, self._kept = self._kept, []
        for sequence in kept:
            self.kv.close(sequence)
        return bool(kept)


def _build(options: StaticOptions, kv: Allocator) -> Scheduler:
    return Static(options, kv)


STATIC = SchedulerPlugin(
    name="static",
    summary="a batch runs until its longest member ends",
    options=StaticOptions,
    build=_build,
    chunking=False,
)


@hookimpl
def octavo_schedulers() -> Iterable[SchedulerPlugin]:
    """This module's scheduler."""
    return [STATIC]

"""Engines of every allocator on the fake runner, random work for them, and a recount of their pool from what can be seen from outside."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.step_log import StepLog
from octavo.core.descriptors import PoolShape
from octavo.core.errors import RequestError
from octavo.core.flight import Flight
from octavo.core.kv import Allocator
from octavo.core.outputs import StepReport
from octavo.core.plan import BatchPlan, Chunk
from octavo.core.request import Sequence
from octavo.core.scheduling import Scheduler
from octavo.core.speculation import PromptLookup
from octavo.core.testing.fake_runner import FailurePoint, InjectedFailure
from octavo.core.testing.rig import Rig
from octavo.plugins.allocators.contiguous import CONTIGUOUS
from octavo.plugins.allocators.paged import PAGED
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.prefix import PREFIX
from octavo.plugins.allocators.prefix.allocator import PrefixAllocator
from octavo.plugins.schedulers.chunked import CHUNKED
from octavo.plugins.schedulers.continuous import CONTINUOUS
from octavo.plugins.schedulers.static import STATIC

MAX_MODEL_LEN = 40
ALLOCATORS = {
    "contiguous-max": (CONTIGUOUS, {"reservation": "max"}),
    "contiguous-request": (CONTIGUOUS, {"reservation": "request"}),
    "contiguous-request-buddy": (CONTIGUOUS, {"reservation": "request", "placement": "buddy"}),
    "contiguous-pow2-buddy": (CONTIGUOUS, {"reservation": "pow2", "placement": "buddy"}),
    "contiguous-oracle": (CONTIGUOUS, {"reservation": "oracle"}),
    "paged": (PAGED, {"block_size": 4}),
    "prefix": (PREFIX, {"block_size": 4}),
}
SCHEDULERS = {"static": (STATIC, {}), "continuous": (CONTINUOUS, {}), "chunked": (CHUNKED, {"max_num_batched_tokens": 8})}


def rig(
    allocator: str, scheduler: str = "continuous", *, slots: int, host: int = 0, max_model_len: int = MAX_MODEL_LEN, **options: Any
) -> Rig:
    """`options` are the scheduler's; `failures` the runner's, `block_size` the allocator's."""
    plugin, of_kv = ALLOCATORS[allocator]
    if "block_size" in options:
        of_kv = of_kv | {"block_size": options.pop("block_size")}
    failures = options.pop("failures", None)
    policy, of_policy = SCHEDULERS[scheduler]
    shape = PoolShape(num_slots=slots, num_host_slots=host, max_model_len=max_model_len, max_num_seqs=6)
    kv: Allocator = plugin.build(plugin.options(**of_kv), shape)
    common = {"max_num_seqs": 6, "max_num_batched_tokens": max_model_len}
    made: Scheduler = policy.build(policy.options(**(common | of_policy | options)), kv)
    return Rig(made, kv, max_model_len=max_model_len, failures=failures)


@dataclass
class Hold:
    """A block as one set of owners had it: at these steps."""

    owners: frozenset[str]
    count: int
    steps: list[int] = field(default_factory=list)
    filled: int = 0
    next: Hold | None = None


class Recount:
    """Looks at the whole pool and at all rows before each step and after it. Only for runs at depth 1 without beams on blocks."""

    def __init__(self, of: Rig) -> None:
        self.rig = of
        self.steps = 0
        self.done: list[Hold] = []
        self.now: dict[int, Hold] = {}
        self.rows: list[tuple[Sequence, Chunk, bool, list[Hold]]] = []
        planned: Callable[[Flight], None] = of.engine.reports.planned

        def both(flight: Flight) -> None:
            self.planned(flight)
            planned(flight)

        fork = of.kv.fork

        def seen(parent: Sequence, child: Sequence, num_tokens: int) -> None:
            fork(parent, child, num_tokens)
            self.see_owners()
            self.fill([self.now[start] for start in self.blocks(child)], num_tokens)

        of.engine.reports.planned, of.kv.fork = both, seen  # type: ignore[method-assign]
        of.engine.observers.add(self)

    def blocks(self, sequence: Sequence) -> list[int]:
        """First slots of what the sequence has, in the order of its positions."""
        kv = self.rig.kv
        if isinstance(kv, PagedAllocator | PrefixAllocator):
            paged = kv if isinstance(kv, PagedAllocator) else kv._paged
            return [block * kv.block_size for block in paged.blocks(sequence)]
        return [kv.region(sequence)[0]]

    def see_owners(self) -> None:
        """Who has what now."""
        region, states = self.rig.kv.layout == "region", {state.start: state for state in self.rig.kv.snapshot() if state.owners}
        for start in list(self.now):
            if start not in states:
                self.done.append(self.now.pop(start))
        for start, state in states.items():
            owners, hold = frozenset(state.owners), self.now.get(start)
            if hold is None or not (owners == hold.owners if region else owners & hold.owners):
                new = Hold(owners, state.count)
                if hold is not None:
                    self.done.append(hold)
                    if region and len({name.partition("/")[0] for name in owners | hold.owners}) == 1:
                        hold.next = new
                hold = self.now[start] = new
            hold.owners = owners

    def look(self) -> None:
        """Who has what now, and what of it is written."""
        self.see_owners()
        for request in self.rig.engine.requests.values():
            for sequence in request.sequences:
                if sequence.num_computed:
                    self.fill([self.now[start] for start in self.blocks(sequence)], sequence.num_computed)

    def planned(self, flight: Flight) -> None:
        """The step runs with what is held now."""
        self.look()
        for hold in self.now.values():
            hold.steps.append(self.steps)
        self.rows = []
        for chunk in flight.plan.chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            self.rows.append((sequence, chunk, request.samples_jointly, [self.now[start] for start in self.blocks(sequence)]))
        self.steps += 1

    def fill(self, holds: list[Hold], num_tokens: int) -> None:
        """The first positions of a sequence that has these are written."""
        for hold in holds:
            hold.filled = max(hold.filled, min(num_tokens, hold.count))
            num_tokens -= hold.count
            if num_tokens <= 0:
                break

    def octavo_step_finished(self, report: StepReport) -> None:
        """Those that ended did so after their last chunk."""
        if not report.error:
            for sequence, chunk, jointly, holds in self.rows:
                self.fill(holds, chunk.stop if jointly else min(chunk.stop, max(chunk.start, sequence.num_tokens - 1)))
        self.look()
        if not report.num_rows and not report.transfers:  # it was never submitted: the pool counts as it is when it is told
            self.planned(Flight(0, BatchPlan(), None, 0.0))
        self.rows = []

    def never_written(self) -> list[int]:
        """For each step, slots held and given back unwritten. After the end of the run."""
        assert not self.now or not any(state.owners for state in self.rig.kv.snapshot())
        found = [0] * self.steps
        holds = self.done + list(self.now.values())
        for hold in holds:
            filled, later = hold.filled, hold.next
            while later is not None:
                filled, later = max(filled, later.filled), later.next
            for step in hold.steps:
                found[step] += hold.count - filled
        return found


def random_run(allocator: str, seed: int, *, kind: str, host: int = 0) -> tuple[StepLog, Recount, Rig]:
    """Some requests through a small pool, to their end, with what `kind` says: plain, forks, beams, drafts or aborts."""
    rng = random.Random(f"{allocator} {seed} {kind}")
    failures = {step: rng.choice(list(FailurePoint)) for step in range(200) if kind == "failures" and rng.random() < 0.1}
    made = rig(
        allocator,
        rng.choice(list(SCHEDULERS)),
        slots=rng.choice([44, 60, 100]),
        host=host,
        failures=failures,
        preemption="swap" if host else "recompute",
    )
    if kind == "drafts":
        made.scheduler.proposer = PromptLookup(num_tokens=3, longest=3, shortest=1)
    recount, log = Recount(made), StepLog(0.0)
    wanted = [f"q{number}" for number in range(10)]
    with log.watching(made.engine):
        while wanted or made.engine.has_work:
            while wanted and (rng.random() < 0.5 or not made.engine.has_work):
                max_tokens = rng.choice([1, 2, 5, 9, 14])
                extra: dict[str, Any] = {"known_output_len": max_tokens, "request_id": wanted.pop()}
                if kind == "forks" and rng.random() < 0.6:
                    extra["n"] = rng.choice([2, 3])
                if kind == "beams" and rng.random() < 0.6:
                    extra = {"beam_width": 2, "request_id": extra["request_id"]}
                with suppress(RequestError):  # it can never fit
                    made.add(rng.choice([1, 3, 7, 8, 12, 20]), max_tokens, **extra)
            if kind == "aborts" and rng.random() < 0.1 and made.engine.requests:
                made.engine.abort(rng.choice(list(made.engine.requests)))
            try:
                made.step()
            except InjectedFailure:
                made.clock.advance(1.0)
            if made.engine.wait_until is not None:
                made.clock.sleep_until(made.engine.wait_until)
    return log, recount, made

"""Runs of any stack for tests of what is made of them: on the fake runner with a clock of its own, and real ones of a tiny model."""

from __future__ import annotations

from typing import Any

from octavo.bench.drive import drive
from octavo.bench.identity import identify
from octavo.bench.runs import Run
from octavo.bench.step_log import StepLog
from octavo.bench.work import Item, Work
from octavo.core.clock import ManualClock
from octavo.core.execution import Handle, Runner, StepResult
from octavo.core.plan import BatchPlan
from octavo.core.stack import Stack
from octavo.core.testing.fake_runner import FakeHandle, FakeRunner
from tests.bench.pools import rig
from tests.matrix.stacks import build
from tests.models import tiny


def some_work(count: int = 12, *, most: int = 3) -> Work:
    """Prompts that share their beginning by twos, answers of 1, 5, 9 tokens; one a second."""
    items = [
        Item(prompt=tuple(1 + (k * 2 + n // 2) % most for k in range(4 + 5 * (n % 4))), output_len=1 + 4 * (n % 3), at=float(n))
        for n in range(count)
    ]
    return Work(name="some", seed=3, items=items, made_from={"count": count})


class TimedRunner(Runner):
    """A fake runner whose steps take half a second and 10 ms a token, by the engine's clock."""

    def __init__(self, runner: FakeRunner, clock: ManualClock) -> None:
        self.runner, self.clock = runner, clock

    def submit(self, plan: BatchPlan) -> Handle:
        """In no time."""
        return TimedHandle(self.runner.submit(plan), self.clock, 0.5 + 0.01 * plan.num_tokens)

    def forget(self) -> None:
        """As it does."""
        self.runner.forget()


class TimedHandle:
    """A step that takes its time."""

    def __init__(self, handle: FakeHandle, clock: ManualClock, seconds: float) -> None:
        self.handle, self.clock, self.seconds = handle, clock, seconds

    @property
    def transfers_done(self) -> int:
        """As it says."""
        return self.handle.transfers_done

    def result(self) -> StepResult:
        """After that time."""
        result = self.handle.result()
        self.clock.advance(self.seconds)
        result.seconds = {"forward": self.seconds}
        return result


def timed(allocator: str, scheduler: str, *, slots: int = 60, **options: Any) -> Run:
    """A run whose times are exact, through a pool that is too small for all at once."""
    made = rig(allocator, scheduler, slots=slots, **options)
    made.engine.runner = TimedRunner(made.runner, made.clock)
    work, log = some_work(), StepLog(made.clock.now())
    with log.watching(made.engine):
        records = drive(made.engine, work, zero=log.zero)
    return Run(work=work, records=records, steps=log.lines, settings={"rate": 1.0})


def measured(stack: Stack, work: Work | None = None, **options: Any) -> Run:
    """A real run of that work on that stack, with the pool checked after each step."""
    work = work or some_work(8, most=50)
    built = build(tiny("llama_gqa"), stack, **({"max_num_seqs": 4, "max_model_len": 64, "num_kv_slots": 512} | options))
    try:
        engine = built.engine
        log = StepLog(engine.clock.now())
        with log.watching(engine):
            records = drive(engine, work, zero=log.zero, concurrency=6)
        return Run(work=work, records=records, steps=log.lines, identity=identify(built, work), settings={"concurrency": 6})
    finally:
        built.engine.close()

"""The host's own time of a step: planning, inputs, applying, detokenising, with a model that takes none.

    python -m octavo.bench.host_overhead [--allocator paged] [--steps 200] [--tokenizer FOLDER]

N requests decode at once; printed are medians over many steps, in microseconds of CPU time, which a busy machine disturbs less than
the time on the wall. `apply` is the engine's whole application of a result and contains `detokenise`; `inputs` are tensors for the
device. A printed benchmark and no test: it depends on the machine.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from statistics import median
from typing import cast

import torch

from octavo.core.descriptors import AllocatorPlugin, PoolShape, SchedulerPlugin
from octavo.core.engine import Engine
from octavo.core.execution import Handle, Runner, StepResult
from octavo.core.inputs import InputBuilder
from octavo.core.kv import Allocator
from octavo.core.plan import BatchPlan
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.text.output_text import OutputText
from octavo.core.text.tokenizer import Tokenizer

ROWS = (32, 64, 128, 256, 512)
PROMPT_LEN = 64
VOCAB_SIZE = 1000


class CpuClock:
    """Seconds of CPU time that this thread has used: others are not the step's."""

    def now(self) -> float:
        """Since the thread started."""
        return time.thread_time()

    def sleep_until(self, when: float) -> None:
        """Nothing here waits."""


class NullHandle:
    """A step that was over at once."""

    transfers_done = 0

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """The fixed tokens."""
        return self._result


class NullRunner(Runner):
    """Builds the inputs of each step as a real runner does, then answers with fixed tokens."""

    def __init__(self, kv: Allocator, *, max_rows: int) -> None:
        self._clock = CpuClock()
        self._inputs = InputBuilder(kv, device=torch.device("cpu"), max_rows=max_rows)
        self._step = 0

    def submit(self, plan: BatchPlan) -> Handle:
        """No computation but the inputs."""
        begun = self._clock.now()
        self._inputs.build(plan)
        seconds = {"inputs": self._clock.now() - begun}
        self._step += 1
        return NullHandle(StepResult([[100 + (self._step + row) % 800] for row in range(len(plan.chunks))], seconds=seconds))


class Watch:
    """Gathers the parts' times of the steps that decode all rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.parts: dict[str, list[float]] = {"schedule": [], "inputs": [], "apply": []}

    def octavo_step_finished(self, report: object) -> None:
        """Told by the engine after each step."""
        if getattr(report, "num_rows", 0) == getattr(report, "num_tokens", -1) == self.rows:
            for part, times in self.parts.items():
                times.append(getattr(report, "seconds", {})[part])


def measure(
    rows: int,
    *,
    scheduler: SchedulerPlugin,
    allocator: AllocatorPlugin,
    tokenizer: Tokenizer | None,
    steps: int,
    middle: Callable[[list[float]], float] = median,
) -> dict[str, float]:
    """Seconds by part of a step that decodes `rows` requests: the `middle` of all steps (a mean counts what happens now and then)."""
    max_model_len = PROMPT_LEN + steps + 1
    slots = rows * (max_model_len + 64)
    kv = allocator.build(allocator.options(), PoolShape(num_slots=slots, num_host_slots=0, max_model_len=max_model_len, max_num_seqs=rows))
    options = scheduler.options(max_num_seqs=rows, max_num_batched_tokens=rows * PROMPT_LEN + max_model_len)
    engine = Engine(
        scheduler=scheduler.build(options, kv),
        kv=kv,
        runner=NullRunner(kv, max_rows=rows),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        tokenizer=tokenizer,
        clock=CpuClock(),
    )
    watch = Watch(rows)
    engine.observers.add(watch)
    params = SamplingParams(max_tokens=steps, temperature=0.0)
    for number in range(rows):
        engine.add_request([1 + (number + i) % 900 for i in range(PROMPT_LEN)], params)
    gc.collect()
    gc.disable()  # its pauses are of the process, not of the step
    try:
        while engine.has_work:
            engine.step()
    finally:
        gc.enable()
    result = {part: middle(times) for part, times in watch.parts.items()}
    result["detokenise"] = _detokenise(rows, tokenizer, params, steps)
    return result


def _detokenise(rows: int, tokenizer: Tokenizer | None, params: SamplingParams, steps: int) -> float:
    """Median seconds of the text of one step's tokens, alone."""
    texts = [OutputText(tokenizer, params=params, stop_ids=frozenset(), max_tokens=steps + 1) for _ in range(rows)]
    clock, times = CpuClock(), []
    for step in range(steps):
        begun = clock.now()
        for row, text in enumerate(texts):
            text.push((100 + (step + row) % 800,))
        times.append(clock.now() - begun)
    return median(times)


def main(argv: Seq[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.host_overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scheduler", default="continuous")
    parser.add_argument("--allocator", default="paged")
    parser.add_argument("--steps", type=int, default=200, help="steps to take the median of")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; without one there is no text to make")
    args = parser.parse_args(argv)
    registry = Registry.discover()
    scheduler = cast(SchedulerPlugin, registry.get("scheduler", args.scheduler))
    allocator = cast(AllocatorPlugin, registry.get("allocator", args.allocator))
    tokenizer = Tokenizer.from_folder(args.tokenizer) if args.tokenizer else None
    with_text = "with a tokenizer" if tokenizer else "without text"
    print(f"{args.scheduler} + {args.allocator}, {with_text}; median of {args.steps} steps, microseconds of CPU time")
    print(f"{'rows':>6}{'schedule':>10}{'inputs':>10}{'apply':>10}{'(detokenise)':>14}{'total':>10}{'a row':>8}")
    for rows in ROWS:
        times = measure(rows, scheduler=scheduler, allocator=allocator, tokenizer=tokenizer, steps=args.steps)
        total = times["schedule"] + times["inputs"] + times["apply"]
        cells = (
            f"{times['schedule'] * 1e6:>10.0f}{times['inputs'] * 1e6:>10.0f}{times['apply'] * 1e6:>10.0f}{times['detokenise'] * 1e6:>14.0f}"
        )
        print(f"{rows:>6}{cells}{total * 1e6:>10.0f}{total / rows * 1e6:>8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

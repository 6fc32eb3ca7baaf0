"""Where a cell's time goes: the forward pass in parts, and how near its steps come to what the device can do.

The parts come from a run of its own with timers around kernel and linears, after the repeats; the roofline from the repeats' own steps.
Must not know: other cells, how figures are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.spec import LoadSpec
from octavo.bench.drive import Progress, drive
from octavo.bench.roofline import Limits, RooflineShare, cost_model, measure_limits, roofline
from octavo.bench.runs import Run
from octavo.bench.step_parts import ForwardParts, timed_parts
from octavo.bench.work import Work
from octavo.core.assembly import BuiltEngine
from octavo.core.settings.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Of one cell in one scenario."""

    forward: ForwardParts  # seconds, of all steps of one run with timers
    knows_linears: bool  # False: they could not be told from the rest
    limits: Limits  # what the device was seen to do
    roofline: dict[str, RooflineShare]  # by kind of step, over all repeats: decode, prompts


def break_down(
    engines: Engines,
    config: EngineConfig,
    work: Work,
    *,
    load: LoadSpec,
    warm_up: Callable[[BuiltEngine], None],
    progress: Progress,
    runs: Sequence[Run],
) -> Breakdown:
    """Run the work once more with timers, warmed up as the repeats were, and hold the steps of `runs` against the device."""
    loaded = engines.loaded(config)
    with engines.open(config) as built:
        warm_up(built)
        built.engine.kv.reset()
        with timed_parts(built.engine) as parts:
            drive(built.engine, work, concurrency=load.concurrency, timeout_s=load.timeout_s, progress=progress)
    limits = measure_limits(loaded.facts.device, loaded.facts.dtype)
    steps = [line for run in runs for line in run.steps]
    return Breakdown(
        forward=parts.total, knows_linears=parts.knows_linears, limits=limits, roofline=roofline(steps, cost_model(loaded), limits)
    )

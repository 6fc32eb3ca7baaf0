"""The work of a scenario: its workload by name, with its sizes, a seed, and when its requests arrive.

Must not know: engines, cells.
"""

from __future__ import annotations

from octavo.bench.ablation.spec import ScenarioSpec
from octavo.bench.arrivals import Arrivals
from octavo.bench.clipping import clip
from octavo.bench.drawing import Encode
from octavo.bench.work import Work
from octavo.bench.workloads import make_work
from octavo.core.errors import InvalidOptionsError, RequestError


def scenario_work(
    scenario: ScenarioSpec, name: str, *, seed: int, vocab_size: int, max_model_len: int, encode: Encode | None = None
) -> Work:
    """The same for the same seed, cut to the context.

    Raises InvalidOptionsError that names the scenario where there is no such workload, or its sizes do not fit it.
    """
    workload, load = scenario.workload, scenario.load
    arrivals = None if load.rate is None else Arrivals(rate=load.rate, burstiness=load.burstiness)
    try:
        work = make_work(
            workload.kind,
            count=workload.count,
            vocab_size=vocab_size,
            seed=seed,
            options=workload.sizes,
            arrivals=arrivals,
            encode=encode,
        )
    except RequestError as error:
        raise InvalidOptionsError(f"scenarios.{name}.workload: {error}") from error
    return clip(work, max_model_len)[0]

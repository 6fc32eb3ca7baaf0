"""What cells are compared by: figures of one run, by name, and which way is better.

A name may end in a class of requests, as in "TTFT p99 [chat]". Must not know: cells, repeats, how figures are printed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.bench.metrics import Metrics, measure
from octavo.bench.records import RequestRecord
from octavo.core.errors import InvalidOptionsError
from octavo.core.suggest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a run. `of` gives NaN where the run has none."""

    name: str
    higher_is_better: bool
    of: Callable[[Metrics], float]
    class_name: str | None = None

    def __call__(self, records: Sequence[RequestRecord]) -> float:
        """The figure; infinite where so many requests failed that the percentile is one of them."""
        duration = max((record.ended for record in records), default=0.0)
        chosen = [record for record in records if self.class_name in (None, record.class_name)]
        return self.of(measure(chosen, duration=duration)) if chosen else math.nan


def _latencies() -> dict[str, Measure]:
    names = {"queue": "queue", "TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "E2E": "e2el"}
    found = {}
    for label, field in names.items():
        found[f"{label} mean"] = Measure(name=f"{label} mean", higher_is_better=False, of=lambda m, f=field: getattr(m, f).mean)  # type: ignore[misc]
        for percent in (50, 95, 99):
            name = f"{label} p{percent}"
            found[name] = Measure(
                name=name,
                higher_is_better=False,
                of=lambda m, f=field, p=percent: getattr(m, f).percentile(p),  # type: ignore[misc]
            )
    return found


MEASURES: dict[str, Measure] = {
    "output tok/s": Measure(name="output tok/s", higher_is_better=True, of=lambda m: m.output_throughput),
    "total tok/s": Measure(name="total tok/s", higher_is_better=True, of=lambda m: m.total_token_throughput),
    "req/s": Measure(name="req/s", higher_is_better=True, of=lambda m: m.request_throughput),
    **_latencies(),
}
"""By name: throughput, and mean, p50, p95 and p99 of each latency, in seconds."""


def find_measure(text: str) -> Measure:
    """The measure of that name. Raises InvalidOptionsError that lists them."""
    found = re.fullmatch(r"(.*?)(?: \[(.+)\])?", text)
    name, class_name = (found[1], found[2]) if found else (text, None)
    if name not in MEASURES:
        raise InvalidOptionsError(f"compared: {name!r} is no measure{did_you_mean(name, MEASURES)}; measures are {', '.join(MEASURES)}")
    known = MEASURES[name]
    return Measure(name=text, higher_is_better=known.higher_is_better, of=known.of, class_name=class_name)

"""Steps timed in turn, so that what disturbs the machine disturbs each of them.

Must not know: what the steps do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median


def compare(steps: Mapping[str, Callable[[], None]], *, seconds: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turn: at least `rounds` times, for `seconds` in all. A first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < rounds:
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - begun) * 1e3)
    return {name: median(values) for name, values in times.items()}

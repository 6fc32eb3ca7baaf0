"""Finds two figures of a table of results that cannot both be true, whatever was measured: in our own, and in other people's.

Figures have the names that `vllm bench serve --save-result` gives them; any may be missing or null, which says nothing.
Must not know: runs, records, how figures came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

SECTIONS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (95.0, 99.0)
ROUNDING = 0.005  # what figures with two or three digits may be off
ORDER = ("median", "p90", "p95", "p99")


def contradiction(table: Mapping[str, Any]) -> str | None:
    """The first contradiction found, in a sentence with the figures; None: there is none."""
    figures = {name: float(value) for name, value in table.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    for check in (_order, _within_the_run, _rates, _first_before_last, _busy):
        problem = check(figures)
        if problem is not None:
            return problem
    return None


def _above(one: float, other: float) -> bool:
    return one > other * (1 + ROUNDING)


def _order(table: Mapping[str, float]) -> str | None:
    """A higher percentile is no lower."""
    for section in SECTIONS:
        present = [(name, table[f"{name}_{section}_ms"]) for name in ORDER if f"{name}_{section}_ms" in table]
        for (lower, low), (upper, high) in pairwise(present):
            if _above(low, high):
                return f"{lower} {section} of {low:g} ms is above {upper} {section} of {high:g} ms"
    return None


def _within_the_run(table: Mapping[str, float]) -> str | None:
    """No request took longer than the whole run."""
    duration = table.get("duration")
    for section in SECTIONS if duration else ():
        for name in ("mean", *ORDER):
            value = table.get(f"{name}_{section}_ms")
            if value is not None and duration is not None and _above(value, 1000 * duration):
                return f"{name} {section} of {value:g} ms is longer than the whole run of {duration:g} s"
    return None


def _rates(table: Mapping[str, float]) -> str | None:
    """Throughput is count by duration."""
    duration = table.get("duration")
    counts = {
        "request_throughput": ("completed",),
        "output_throughput": ("total_output_tokens",),
        "total_token_throughput": ("total_input_tokens", "total_output_tokens"),
    }
    for rate, names in counts.items() if duration else ():
        stated = table.get(rate)
        if stated is None or duration is None or any(name not in table for name in names):
            continue
        expected = sum(table[name] for name in names) / duration
        if _above(expected, stated) or _above(stated, expected):
            return f"{' and '.join(names)} in {duration:g} s make {expected:.2f} a second, but {rate} is {stated:g}"
    return None


def _first_before_last(table: Mapping[str, float]) -> str | None:
    """A request's first token does not come after its last, whatever the percentile; the mean is over those that have both."""
    for name in ORDER:
        first, whole = table.get(f"{name}_ttft_ms"), table.get(f"{name}_e2el_ms")
        if first is not None and whole is not None and _above(first, whole):
            return f"{name} ttft of {first:g} ms is above {name} e2el of {whole:g} ms"
    return None


def _busy(table: Mapping[str, float]) -> str | None:
    """Requests do not spend more time in the system than so many at once can in the run's duration (Little's law)."""
    names = ("duration", "completed", "mean_e2el_ms", "max_concurrency")
    if any(name not in table for name in names):
        return None
    duration, completed, whole, most = (table[name] for name in names)
    inside = completed * whole / 1000 / duration if duration else 0.0
    if _above(inside, most):
        return (
            f"{completed:g} requests of {whole:g} ms each in {duration:g} s are {inside:.1f} in the system on average, "
            f"but at most {most:g} were sent at once"
        )
    return None

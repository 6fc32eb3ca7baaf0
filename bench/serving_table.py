"""The table that people know from `vllm bench serve`, line by line, and the same figures under the same names for a JSON file.

Must not know: where records come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.bench.distribution import Distribution
from octavo.bench.metrics import Metrics

WIDTH = 50
SECTIONS = {
    "queue": ("Queue", "Time in the Queue"),
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "token_gap": ("Gap", "Gaps between Tokens (0 where they came together)"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "normalized": ("Norm", "Normalized Latency (end to end / output tokens)"),
}
"""By the name of the latency in `Metrics`: its short name and its section's title."""

DEFAULT_SECTIONS = ("ttft", "tpot", "itl", "e2el")
DEFAULT_PERCENTILES = (99.0,)
GROUP_SECTIONS = ("queue", *DEFAULT_SECTIONS)
GROUP_PERCENTILES = (50.0, 95.0, 99.0)


def serving_table(
    metrics: Metrics,
    *,
    title: str = "Serving Benchmark Result",
    settings: Sequence[tuple[str, str]] = (),
    sections: Sequence[str] = DEFAULT_SECTIONS,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    stability: Mapping[str, str] | None = None,
) -> str:
    """Lines without a newline at the end. `settings` are further lines, of the run itself; `stability` has a section of its own.

    Raises KeyError for an unknown section.
    """
    lines = [f" {title} ".center(WIDTH, "=")]
    lines.append(_line("Successful requests:", str(metrics.succeeded)))
    if failed := metrics.requests - metrics.succeeded:
        lines.append(_line("Failed requests:", str(failed)))
        lines += [_line(f"  {reason}:", str(count)) for reason, count in sorted(metrics.failures.items())]
    lines += [_line(f"{name}:", value) for name, value in settings]
    lines += [
        _line("Benchmark duration (s):", f"{metrics.duration:.2f}"),
        _line("Total input tokens:", str(metrics.input_tokens)),
        _line("Total generated tokens:", str(metrics.output_tokens)),
        _line("Request throughput (req/s):", f"{metrics.request_throughput:.2f}"),
        _line("Output token throughput (tok/s):", f"{metrics.output_throughput:.2f}"),
        _line("Total Token throughput (tok/s):", f"{metrics.total_token_throughput:.2f}"),
    ]
    for section in sections:
        lines += _section(section, metrics, percentiles)
    if stability:
        lines += ["Stability".center(WIDTH, "-"), *(_line(f"{name[0].upper()}{name[1:]}:", value) for name, value in stability.items())]
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"{name:<40} {value}"


def _section(section: str, metrics: Metrics, percentiles: Sequence[float]) -> Iterator[str]:
    short, title = SECTIONS[section]
    values: Distribution = getattr(metrics, section)
    yield title.center(WIDTH, "-")
    if not values and not values.missing:
        yield "none measured"
        return
    yield _line(f"Mean {short} (ms):", f"{values.mean * 1000:.2f}")
    yield _line(f"Median {short} (ms):", f"{values.median * 1000:.2f}")
    for percent in percentiles:
        yield _line(f"P{percent:g} {short} (ms):", f"{values.percentile(percent) * 1000:.2f}")


def as_json(
    metrics: Metrics, *, sections: Sequence[str] = DEFAULT_SECTIONS, percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> dict[str, Any]:
    """The figures under the names that `vllm bench serve --save-result` has; where there is none, or it is infinite, null."""
    found: dict[str, Any] = {
        "duration": metrics.duration,
        "completed": metrics.succeeded,
        "failed": metrics.requests - metrics.succeeded,
        "failures": metrics.failures,
        "total_input_tokens": metrics.input_tokens,
        "total_output_tokens": metrics.output_tokens,
        "request_throughput": metrics.request_throughput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
    }
    for section in sections:
        values: Distribution = getattr(metrics, section)
        found[f"mean_{section}_ms"] = _number(values.mean)
        found[f"median_{section}_ms"] = _number(values.median)
        found |= {f"p{percent:g}_{section}_ms": _number(values.percentile(percent)) for percent in percentiles}
    return found


def _number(seconds: float) -> float | None:
    return seconds * 1000 if abs(seconds) < float("inf") else None


def group_table(kind: str, groups: Mapping[str, Metrics]) -> str:
    """A line for each group and latency: requests, how many failed, tokens a second, then mean and percentiles in ms."""
    lines = [(kind, "requests", "failed", "tok/s", "ms", "mean", *(f"P{percent:g}" for percent in GROUP_PERCENTILES))]
    for name, group in groups.items():
        counts = f"{group.requests}", f"{group.requests - group.succeeded}", f"{group.output_throughput:.1f}"
        for section in GROUP_SECTIONS:
            values: Distribution = getattr(group, section)
            found = values.mean, *(values.percentile(percent) for percent in GROUP_PERCENTILES)
            lines.append((name, *counts, SECTIONS[section][0], *("-" if math.isnan(one) else f"{one * 1000:.1f}" for one in found)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [[c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(line, widths, strict=True))] for line in lines]
    return "\n".join("  ".join(line) for line in cells)

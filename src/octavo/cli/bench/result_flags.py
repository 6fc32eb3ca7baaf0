"""Flags that say what is printed and kept of a measurement, and what makes it fail.

Must not know: how it is made.
"""

from __future__ import annotations

import argparse

from octavo.bench.serving_table import DEFAULT_PERCENTILES, DEFAULT_SECTIONS, SECTIONS
from octavo.core.errors import RequestError


def add_metric_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--percentile-metrics` and `--metric-percentiles`."""
    group = parser.add_argument_group("result")
    group.add_argument(
        "--percentile-metrics",
        default=",".join(DEFAULT_SECTIONS),
        metavar="NAMES",
        help=f"sections of the table, with commas, of {', '.join(SECTIONS)} (default: {','.join(DEFAULT_SECTIONS)})",
    )
    group.add_argument(
        "--metric-percentiles",
        default=",".join(f"{percent:g}" for percent in DEFAULT_PERCENTILES),
        metavar="NUMBERS",
        help="percentiles in each section, with commas (default: 99)",
    )


def add_noise_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--allow-noise`."""
    parser.add_argument(
        "--allow-noise",
        action="store_true",
        help="self-checks of time, which a busy machine can fail, warn and do not make the exit status 1",
    )


def sections_from(args: argparse.Namespace) -> list[str]:
    """Names of sections. Raises RequestError."""
    names = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
    for name in names:
        if name not in SECTIONS:
            raise RequestError(f"--percentile-metrics: there is no {name!r}; there are: {', '.join(SECTIONS)}", field="percentile_metrics")
    return names


def percentiles_from(args: argparse.Namespace) -> list[float]:
    """Numbers between 0 and 100. Raises RequestError."""
    try:
        found = [float(word) for word in args.metric_percentiles.split(",") if word.strip()]
    except ValueError:
        found = [-1.0]
    if not all(0 <= percent <= 100 for percent in found):
        raise RequestError(
            f"--metric-percentiles: {args.metric_percentiles!r} is not numbers from 0 to 100 with commas between",
            field="metric_percentiles",
        )
    return found

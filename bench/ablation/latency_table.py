"""Latencies of an ablation's cells, or of groups of their requests, a line each; and what requests said that have no whole answer.

Must not know: engines, files, tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.bench.ablation.summary import Latency, Speed
from octavo.bench.markdown import FEW_VALUES, UNKNOWN, p99, table, time
from octavo.bench.runs import Run

NAMES = {"queue": "queue", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
HEADS = ["latency", "mean", "p50", "p95", "p99", "values a repeat"]
FIRST = 3  # kinds of failures of a cell that are listed


def latencies(speeds: Mapping[tuple[str, ...], Speed], *, of: Sequence[str] = ("cell",)) -> list[str]:
    """Medians of the repeats, by what each is of; `of` heads these columns. Nothing where there is none."""
    heads = [*of, *HEADS]
    rows = [[*names, label, *_figures(one.latencies[field])] for names, one in speeds.items() for field, label in NAMES.items()]
    marked = any(row[heads.index("p99")].endswith("*") for row in rows)
    return [*table(heads, rows), *(["", FEW_VALUES] if marked else [])]


def _figures(one: Latency) -> list[str]:
    fewest, most = min(one.counts), max(one.counts)
    if not most:
        return [UNKNOWN] * 4 + ["0"]
    count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return [*(time(value) for value in (one.mean, one.p50, one.p95)), p99(one.p99, count=fewest), count]


def failures(cells: Mapping[str, Sequence[Run]]) -> list[str]:
    """Of each cell's runs, what failed requests said, the first of each kind; nothing where all were answered."""
    lines = []
    for name, runs in cells.items():
        kinds: dict[str, list[str]] = {}
        for run in runs:
            for record in run.records:
                if not record.succeeded:
                    said = f"{record.finish_reason or 'unanswered'}{f': {record.error}' if record.error else ''}"
                    kinds.setdefault(said, []).append(f"seed {run.work.seed}, request {record.index}")
        lines += [f"* {name}: {len(where)} x {said} (the first: {where[0]})" for said, where in list(kinds.items())[:FIRST]]
        if len(kinds) > FIRST:
            lines.append(f"* {name}: further kinds of failures: {len(kinds) - FIRST}")
    return ["Requests without a whole answer:", "", *lines] if lines else []

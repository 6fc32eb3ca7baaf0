"""With what an ablation was measured: once what all cells share, and a line a cell of what they may differ in.

Must not know: engines, files, figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from octavo.bench.ablation.result import AblationResult
from octavo.bench.identity import Identity
from octavo.bench.markdown import GIB, UNKNOWN, table
from octavo.bench.runs import Run

DIGITS = 8  # of a sha256
HEADS = ["scenario", "cell", "stack", "config", "dtype", "threads", "workloads, a repeat each"]

SHARED: dict[str, Callable[[Identity], str]] = {
    "model": lambda one: one.model,
    "revision": lambda one: one.model_revision,
    "versions": lambda one: ", ".join(f"{name} {version}" for name, version in one.versions.items() if version),
    "device": lambda one: f"{one.device}{f', driver {one.driver}' if one.driver else ''}",
    "machine": lambda one: f"{one.cpu}, {one.cores} cores, {one.memory / GIB:.0f} GiB",
    "context and pool": lambda one: f"max_model_len {one.max_model_len}, {one.pool_slots} slots, {one.pool_bytes / GIB:.3f} GiB",
}
"""Of all runs; where several differ, each value is given."""


def measured_with(result: AblationResult) -> list[str]:
    """Both tables; nothing where no run says what it was measured with. A hash is the first digits of its sha256."""
    identities = [run.identity for _, run in sorted(result.runs.items()) if run.identity is not None]
    if not identities:
        return []
    dates = sorted(one.date for one in identities)
    rows = [["date", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"]]
    rows += [[name, _each(map(text, identities))] for name, text in SHARED.items()]
    every = range(result.spec.repeats)
    cells = [
        _row(scenario, cell.name, runs)
        for scenario, ran in result.cells.items()
        for cell in ran
        if any(runs := [result.runs.get((scenario, cell.name, repeat)) for repeat in every])
    ]
    return [*table(["", ""], rows), "", *table(HEADS, cells)]


def _row(scenario: str, cell: str, repeats: Sequence[Run | None]) -> list[str]:
    """`repeats`: None, where it broke or is still to come."""
    identities = [run.identity for run in repeats if run is not None and run.identity is not None]
    return [
        scenario,
        cell,
        _each(" + ".join(one.stack.values()) for one in identities),
        _each(one.config_hash[:DIGITS] for one in identities),
        _each(one.dtype if one.kv_dtype == one.dtype else f"{one.dtype}, KV in {one.kv_dtype}" for one in identities),
        _each(f"{one.threads}" for one in identities),
        " ".join(UNKNOWN if run is None else run.work.digest[:DIGITS] for run in repeats),
    ]


def _each(values: Iterable[str]) -> str:
    """One text, where all are the same."""
    return " / ".join(dict.fromkeys(values))

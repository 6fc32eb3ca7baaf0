"""`Figures`: of a result only what another result is compared with, small enough to be kept in a repository.

A result is an ablation's folder, a run's folder, a folder of runs that are repeats of each other, or figures kept in a file.
Must not know: what is made of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.result import FILE as ABLATION, AblationResult
from octavo.bench.identity import Identity
from octavo.bench.runs import HEADER, Run
from octavo.bench.schema import migrated
from octavo.bench.self_checks import failed_checks
from octavo.bench.whole_files import recover, recover_all, write_whole
from octavo.core.errors import ResultError

SCHEMA_VERSION = 1
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}  # of a kept file
MEASURES = ("output tok/s", "TTFT p50", "ITL p50", "ITL p99")
KEPT = "figures.json"  # in a folder
RUN = "run"  # the name of the only cell of a result that is no ablation


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """One stack under one load. Lists have an entry a repeat, in the order of the work's seeds."""

    identity: Identity  # of the first repeat
    workloads: list[str]  # their hashes
    failed: list[int]  # requests without an answer
    values: dict[str, list[float | None]]  # by measure, seconds or a rate; None: there is no such number
    load: dict[str, Any] = field(default_factory=dict)  # how requests came: rate, concurrency, time-outs; empty: not known
    tokens_hold: bool = True  # they are what they must be, as far as they were compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """`cells` by name, of an ablation "scenario/cell"."""

    cells: dict[str, CellFigures]
    problems: list[str] = field(default_factory=list)  # self-checks that failed: figures that contradict each other
    doubts: list[str] = field(default_factory=list)  # those of them that a busy machine can fail
    notes: list[str] = field(default_factory=list)  # how it was measured, where that is unlike others: in several parts
    schema_version: int = SCHEMA_VERSION

    def save(self, path: str | Path) -> None:
        """As a JSON file. Raises ResultError where it cannot be written."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(_FIGURES.dump_python(self, mode="json"), indent=1) + "\n")
        except OSError as error:
            raise ResultError(f"{path} cannot be written: {error.strerror}") from error


def read_figures(path: str | Path) -> Figures:
    """Of any result. Raises ResultError that says what is missing, damaged or too new."""
    path = Path(path)
    recover(path)
    if path.is_file():
        return _read(path)
    if (path / KEPT).is_file():
        return _read(path / KEPT)
    if (path / ABLATION).is_file():
        return of_ablation(AblationResult.load(path))
    if (path / HEADER).is_file():
        return of_runs([Run.load(path)])
    recover_all(path)
    repeats = sorted(header.parent for header in path.glob(f"*/{HEADER}") if not header.parent.name.startswith("."))
    if not repeats:
        raise ResultError(f"{path} is no result: it holds neither {ABLATION} nor {HEADER} nor {KEPT}, nor folders of runs")
    return of_runs([Run.load(folder) for folder in repeats])


def of_runs(runs: Sequence[Run]) -> Figures:
    """Of repeats of one run, which differ in their seed at most. Raises ResultError where they are not."""
    runs = sorted(runs, key=lambda run: run.work.seed)
    for run in runs:
        if not run.complete:
            raise ResultError(f"a run with seed {run.work.seed} was interrupted: measure it again")
    found = [(one.of_time, f"seed {run.work.seed}: {one.check}: {one.problem}") for run in runs for one in failed_checks(run)]
    problems, doubts = ([text for of_time, text in found if of_time is wanted] for wanted in (False, True))
    if any(run.identity and runs[0].identity and run.identity.config_hash != runs[0].identity.config_hash for run in runs):
        raise ResultError("the runs are not repeats of each other: their settings differ")
    for run in runs:
        if run.settings != runs[0].settings:
            raise ResultError(f"the runs are not repeats of each other: one was sent with {runs[0].settings}, another with {run.settings}")
    notes = [f"the run with seed {run.work.seed} was measured in {len(run.parts)} parts" for run in runs if run.parts]
    return Figures(cells={RUN: _cell(runs, tokens_hold=True)}, problems=problems, doubts=doubts, notes=notes)


def of_ablation(result: AblationResult) -> Figures:
    """Of every cell that ran, the noise floor too. Raises ResultError where it is not finished or a run broke."""
    if result.broken:
        raise ResultError("runs broke: " + "; ".join(f"{where}: {why}" for where, why in result.broken.items()))
    if not result.finished and result.tokens_agree:
        raise ResultError("the ablation is not finished: octavo ablate --resume goes on")
    cells = {
        f"{scenario}/{cell.name}": _cell(runs, tokens_hold=result.holds(scenario, cell.name))
        for scenario, ran in result.cells.items()
        for cell in ran
        if (runs := result.of(scenario, cell.name))
    }
    failed = (result.failed_checks(of_time=of_time) for of_time in (False, True))
    problems, doubts = ([f"{where}: {text}" for where, texts in found.items() for text in texts] for found in failed)
    return Figures(cells=cells, problems=problems, doubts=doubts)


def _cell(runs: Sequence[Run], *, tokens_hold: bool) -> CellFigures:
    identity = runs[0].identity
    if identity is None:
        raise ResultError("a run says nothing of model and device, as one of a server over HTTP: it cannot be compared with another")
    found = {name: [find_measure(name)(run.records) for run in runs] for name in MEASURES}
    return CellFigures(
        identity=identity,
        workloads=[run.work.digest for run in runs],
        failed=[sum(not record.succeeded for record in run.records) for run in runs],
        values={name: [value if math.isfinite(value) else None for value in values] for name, values in found.items()},
        load={name: value for name, value in runs[0].settings.items() if name != "model"},  # the identity says its revision
        tokens_hold=tokens_hold,
    )


def _read(path: Path) -> Figures:
    try:
        content = dict(json.loads(path.read_text(encoding="utf-8")))
        return _FIGURES.validate_python(migrated(content, MIGRATIONS, where=path, to=SCHEMA_VERSION, header=lambda content: content))
    except ValidationError as error:
        problem = error.errors()[0]
        raise ResultError(f"{path} is damaged: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ResultError(f"{path} holds no figures of Octavo: {error}") from error


_FIGURES = TypeAdapter(Figures)

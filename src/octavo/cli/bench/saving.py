"""`--save-result`: a run as a folder, with the figures of its table beside the raw records.

Must not know: how it was measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.bench.metrics import measure
from octavo.bench.serving_table import as_json
from octavo.cli.bench.json_figures import figures_json
from octavo.cli.settings import say
from octavo.core.errors import RequestError, ResultError

if TYPE_CHECKING:
    from octavo.bench.runs import Run

FIGURES = "metrics.json"


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--save-result`, `--result-dir` and `--result-filename`."""
    group = parser.add_argument_group("saving")
    group.add_argument("--save-result", action="store_true", help="keep work, records, steps and figures as a folder")
    group.add_argument("--result-dir", metavar="DIR", help="where that folder is put (default: results)")
    group.add_argument("--result-filename", metavar="NAME", help="its name (default: workload, model and time)")


def check_result(args: argparse.Namespace) -> None:
    """What cannot be saved shows before anything is measured. Raises RequestError."""
    for flag in ("result_dir", "result_filename"):
        if getattr(args, flag) is not None and not args.save_result:
            raise RequestError(f"--{flag.replace('_', '-')} says where a result goes: give --save-result too", field=flag)
    folder = Path(args.result_dir or "results")
    if args.save_result:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"--result-dir {folder} cannot be made: {error.strerror}", field="result_dir") from None


def save_result(args: argparse.Namespace, run: Run, *, sections: Sequence[str], percentiles: Sequence[float]) -> Path | None:
    """Write it, if asked for, and say where; a run that was gone on with is where it was. Ctrl-C waits until it is written.

    The run is written even where its figures cannot be made. Raises ResultError where it cannot be written.
    """
    if not args.save_result:
        return None
    from octavo.bench.interrupts import HeldInterrupts

    model = re.sub(r"[^A-Za-z0-9.]+", "-", str(run.settings.get("model", "model"))).strip("-")
    name = args.result_filename or f"{run.work.name}-{model}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(args.resume) if args.resume else Path(args.result_dir or "results") / name
    beside: dict[str, str] = {}
    with HeldInterrupts() as interrupts:
        try:
            beside[FIGURES] = _figures(run, sections=sections, percentiles=percentiles)
        finally:
            try:
                run.save(folder, beside=beside)
            except OSError as error:
                raise ResultError(f"the result cannot be written to {folder}: {error.strerror}") from error
    say(f"saved in {folder}")
    if interrupts.came:
        raise KeyboardInterrupt
    return folder


def _figures(run: Run, *, sections: Sequence[str], percentiles: Sequence[float]) -> str:
    from octavo.bench.stability import stability  # numpy: not before something was measured

    figures = as_json(measure(run.records), sections=sections, percentiles=percentiles)
    told = {**run.settings, **figures, "stability": asdict(stability(run)), "parts": max(1, len(run.parts))}
    identities = {"identity": run.identity, "server": run.server}
    return figures_json(told, **{name: None if one is None else asdict(one) for name, one in identities.items()})

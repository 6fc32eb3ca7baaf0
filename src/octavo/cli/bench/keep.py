"""`octavo bench keep`: of a result only what `octavo bench compare` needs, small enough for a repository."""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.cli.bench.result_flags import add_noise_argument
from octavo.cli.settings import say
from octavo.core.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("result", metavar="DIR", help="an ablation's folder, a run's, or a folder of runs that are its repeats")
    parser.add_argument("file", metavar="FILE", help="the JSON file to write")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    add_noise_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write it. Status 1: it fails a self-check, is kept with that, and octavo bench compare will fail too."""
    from octavo.bench.figures import read_figures

    if Path(args.file).exists() and not args.force:
        raise RequestError(f"{args.file} exists already: give another name, or --force to write over it", field="file")
    found = read_figures(args.result)
    found.save(args.file)
    repeats = max((len(cell.workloads) for cell in found.cells.values()), default=0)
    say(f"{len(found.cells)} cells with up to {repeats} repeats kept in {args.file}")
    for problem in [*found.problems[:3], *found.doubts[:3]]:
        say(f"self-check failed: {problem}")
    return 1 if found.problems or (found.doubts and not args.allow_noise) else 0

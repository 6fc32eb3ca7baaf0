"""`octavo bench compare`: is the new result slower than the old one? For a person and for CI."""

from __future__ import annotations

import argparse
import math

from octavo.cli.bench.result_flags import add_noise_argument
from octavo.cli.settings import say
from octavo.core.errors import RequestError

TOLERANCE = 5.0
SHOWN = 3  # self-checks that failed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    what = "an ablation's folder, a run's, a folder of runs that are its repeats, or a file of octavo bench keep"
    parser.add_argument("old", metavar="OLD", help=what)
    parser.add_argument("new", metavar="NEW", help="the same of what is judged")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="PERCENT", help=f"differences up to this are none (default: {TOLERANCE:g})"
    )
    add_noise_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print a table. Status 0: nothing became slower, 1: something did, or a self-check of a result failed (no table, if its figures
    contradict each other), 2: they cannot be compared, or all of a cell is too noisy.
    """
    if not (args.tolerance >= 0 and math.isfinite(args.tolerance)):
        raise RequestError(f"--tolerance must be at least 0, not {args.tolerance:g}", field="tolerance")
    from octavo.bench.compare import compare
    from octavo.bench.figures import read_figures
    from octavo.bench.markdown import table

    old, new = read_figures(args.old), read_figures(args.new)
    for name, figures in (("old", old), ("new", new)):
        _say_failed(f"the {name} result, so that it says nothing", figures.problems)
        _say_failed(f"the {name} result", figures.doubts)
    if old.problems or new.problems:
        return 1
    found = compare(old, new, tolerance=args.tolerance / 100)
    for note in found.notes:
        print(f"* {note}")
    print()
    rows = [
        [
            one.cell,
            one.measure,
            str(one.interval) if one.interval else "-",
            f"{1 / one.noise:.2f} to {one.noise:.2f}",
            f"{one.found} ({one.problem})" if one.problem else one.found,
        ]
        for one in found.changes
    ]
    print("\n".join(table(["cell", "measure", "new / old [95 %]", "noise", "verdict"], rows)))
    slower = sum(one.found == "slower" for one in found.changes)
    unknown = sum(one.found == "too noisy to say" for one in found.changes)
    print(f"\n{slower} of {len(rows)} slower, {unknown} too noisy to say.")
    doubtful = bool(old.doubts or new.doubts) and not args.allow_noise
    return 1 if found.regressed or doubtful else 2 if found.says_nothing else 0


def _say_failed(where: str, problems: list[str]) -> None:
    """The first few."""
    for problem in problems[:SHOWN]:
        say(f"self-check failed in {where}: {problem}")
    if len(problems) > SHOWN:
        say(f"and {len(problems) - SHOWN} more in {where}")

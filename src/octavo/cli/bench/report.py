"""`octavo bench report`: one HTML file and Markdown of a saved run or ablation."""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.bench.whole_files import recover
from octavo.cli.bench.result_flags import add_noise_argument
from octavo.cli.settings import say
from octavo.core.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("result", metavar="DIR", help="what octavo bench serve --save-result or octavo ablate has saved")
    parser.add_argument("--out", metavar="DIR", help="where report.html, report.md and figures/ are put (default: DIR itself)")
    parser.add_argument("--no-plots", action="store_true", help="tables alone, without matplotlib")
    add_noise_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write them. Status 1: a self-check failed, and the report says so first."""
    from octavo.bench.ablation.result import FILE, AblationResult
    from octavo.bench.reports.ablation_report import ablation_report
    from octavo.bench.reports.run_report import run_report
    from octavo.bench.runs import Run
    from octavo.bench.self_checks import run_checks

    folder = Path(args.result)
    recover(folder)
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder: name one that octavo bench serve --save-result or octavo ablate made", field="result")
    if (folder / FILE).is_file():
        result = AblationResult.load(folder)
        report, checks = ablation_report(result, plots=not args.no_plots), result.checks()
    else:
        one = Run.load(folder)
        report, checks = run_report(one, plots=not args.no_plots), {"": run_checks(one)}
    for path in report.write(args.out or folder):
        say(f"wrote {path}")
    failed = list(dict.fromkeys(one.check for found in checks.values() for one in found if one.problem))
    for name in failed:
        say(f"self-check failed: {name}: the report says where, before any figure")
    return 1 if any(one.fails(allow_noise=args.allow_noise) for found in checks.values() for one in found) else 0

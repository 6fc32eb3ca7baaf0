"""`octavo ablate`: change one part, keep the rest, and say what it changed, as far as the noise allows."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from octavo.bench.ablation.cells import stack_spec
from octavo.bench.ablation.presets import find_spec, preset_names
from octavo.bench.ablation.spec import AblationSpec, read_spec
from octavo.bench.whole_files import write_whole
from octavo.cli import COMMANDS
from octavo.cli.bench.result_flags import add_noise_argument
from octavo.cli.settings import say
from octavo.core.errors import InvalidOptionsError
from octavo.core.registry import Registry
from octavo.core.settings.layers import from_command_line, merge

if TYPE_CHECKING:
    from octavo.bench.ablation.result import AblationResult

INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("ablate", help=COMMANDS["ablate"], description=COMMANDS["ablate"])
    parser.add_argument("spec", nargs="?", metavar="SPEC", help=f"a TOML file, or one of {', '.join(preset_names())}")
    parser.add_argument("--baseline", metavar="STACK", help='a stack as octavo stacks writes it, "static + paged", or a preset, orca')
    parser.add_argument("--candidate", metavar="STACK", help="the stack to compare with it: one part of it differs")
    parser.add_argument("--model", metavar="SOURCE", help="folder, hub id, GGUF file or catalogue name (default: the specification's)")
    parser.add_argument("--repeats", type=int, metavar="N", help="paired repeats (default: the specification's)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the first repeat's work")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="SECTION.NAME=VALUE",
        action="append",
        default=[],
        help="one setting of every cell, like engine.dtype=bfloat16",
    )
    parser.add_argument("--out", metavar="DIR", help="where the result is kept (default: ablation-NAME-TIME)")
    parser.add_argument("--resume", metavar="DIR", help="go on with a result that was interrupted")
    parser.add_argument("--show", metavar="DIR", help="print the table of a result again")
    add_noise_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 1 where tokens differ or are missing, a run broke, a self-check or a claim failed; 130 after Ctrl-C."""
    if args.show:
        return _print(_load(args.show), allow_noise=args.allow_noise)
    spec, folder = _what(args)
    from octavo.bench.ablation.engines import Engines  # imports torch: not before the specification is known to be right
    from octavo.bench.ablation.running import run_ablation

    say(f"ablation {spec.name}: {len(spec.cells)} cells, {len(spec.scenarios)} scenarios, {spec.repeats} repeats; kept in {folder}")
    with tqdm(unit="request", dynamic_ncols=True, leave=False, smoothing=0.05) as bar:

        def told(text: str, over: int, total: int) -> None:
            bar.total = total or None
            bar.set_description_str(text, refresh=False)
            bar.update(over - bar.n)

        engines = Engines(Registry.discover(), report=lambda line: tqdm.write(line, file=sys.stderr))
        result = run_ablation(engines, spec, folder, resume=args.resume is not None, told=told)
    status = _print(result, keep=folder, allow_noise=args.allow_noise)
    if not result.finished and result.tokens_agree:
        say(f"interrupted; go on with: octavo ablate --resume {folder}")
        return INTERRUPTED
    return status


def _what(args: argparse.Namespace) -> tuple[AblationSpec, Path]:
    """What to run and where to keep it."""
    if args.resume:
        given = [name for name in ("spec", "baseline", "candidate", "model", "repeats", "seed", "out") if getattr(args, name) is not None]
        if given or args.settings:
            raise InvalidOptionsError(
                f"--resume goes on with what was begun; leave out {', '.join([*given, *(['--set'] * bool(args.settings))])}"
            )
        return _load(args.resume).spec, Path(args.resume)
    if (args.baseline is None) != (args.candidate is None):
        raise InvalidOptionsError("--baseline and --candidate go together")
    if args.spec is None and args.baseline is None:
        raise InvalidOptionsError(
            f"what is to be compared? Name a TOML file, one of {', '.join(preset_names())}, or --baseline and --candidate"
        )
    spec = find_spec(args.spec or "quick")
    changes: dict[str, Any] = {name: value for name in ("model", "repeats", "seed") if (value := getattr(args, name)) is not None}
    if args.baseline is not None:
        changes |= {
            "name": spec.name if args.spec else "two stacks",
            "summary": "",
            "cells": stack_spec(args.baseline, args.candidate),
            "claims": (),
        }
    settings = from_command_line(args.settings)
    if settings:
        changes["scenarios"] = {
            name: scenario.model_copy(update={"settings": merge(scenario.settings, settings)}) for name, scenario in spec.scenarios.items()
        }
    spec = read_spec({**dict(spec), **changes}, origin=spec.name)
    folder = Path(args.out or f"ablation-{spec.name.replace(' ', '-')}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and any(folder.iterdir()):
        raise InvalidOptionsError(f"--out {folder}: it is not empty; name another folder, or go on in it with --resume {folder}")
    return spec, folder


def _load(folder: str) -> AblationResult:
    from octavo.bench.ablation.result import AblationResult

    return AblationResult.load(folder)


def _print(result: AblationResult, *, allow_noise: bool, keep: Path | None = None) -> int:
    from octavo.bench.ablation.claims import judge
    from octavo.bench.ablation.table import markdown

    text = markdown(result)
    if keep is not None:
        write_whole(keep / "table.md", text)
    print(text, end="")
    failed = [one for checks in result.checks().values() for one in checks if one.problem]
    for name in dict.fromkeys(one.check for one in failed):
        say(f"self-check failed: {name}: the table says where")
    wrong = bool(result.broken) or any(one.fails(allow_noise=allow_noise) for one in failed)
    return 0 if result.tokens_hold and not wrong and not any(one.outcome == "fails" for one in judge(result)) else 1

"""`--resume`: go on with a run that Ctrl-C stopped, with the arguments that it was begun with, in the folder where it is kept.

Must not know: how a run is measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import RequestError, ResultError

if TYPE_CHECKING:
    from octavo.bench.runs import Run

FREE = ("resume", "api_key", "header", "no_probe", "disable_tqdm", "allow_noise")  # may be given anew; of these nothing is kept
SAME = ("versions", "model_revision", "config_hash", "workload_hash", "device", "driver", "cpu", "cores", "threads")
SAME_SERVER = ("url", "endpoint", "model", "software", "version", "root", "max_model_len", "workload_hash")
Declare = Callable[[argparse.ArgumentParser], None]


def add_resume_argument(parser: argparse.ArgumentParser) -> None:
    """Declare it."""
    parser.add_argument("--resume", metavar="DIR", help="go on with a saved run that was interrupted, with what it was begun with")


def kept(args: argparse.Namespace, declare: Declare) -> dict[str, Any]:
    """The arguments that differ from their defaults, as JSON can hold them, without what is secret."""
    return {name: "inf" if value == math.inf else value for name, value in _given(args, declare).items() if name not in FREE}


def resumed(args: argparse.Namespace, declare: Declare) -> tuple[argparse.Namespace, Run]:
    """What it was begun with, and the run so far. Raises RequestError for other arguments, ResultError where it cannot be gone on with."""
    from octavo.bench.runs import Run

    if given := sorted(_given(args, declare).keys() - set(FREE)):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RequestError(f"--resume goes on with what was begun; leave out {flags}", field="resume")
    run = Run.load(args.resume)
    if not run.complete and not run.arguments:
        raise ResultError(f"{args.resume} does not say with which arguments it was begun, so that nobody can go on with it: measure anew")
    begun = {name: math.inf if value == "inf" else value for name, value in run.arguments.items()}
    return argparse.Namespace(**{**vars(args), **begun}), run


def check_same(folder: str | Path, before: Run, now: Run) -> None:
    """`now` has the identities of what would go on. Raises ResultError that names what has changed."""
    from octavo.bench.identity import differences

    found = []
    for name, same in (("identity", SAME), ("server", SAME_SERVER)):
        one, other = getattr(before, name), getattr(now, name)
        if one is None or other is None:
            found += [f"{name}: {'none' if one is None else 'known'} then, {'none' if other is None else 'known'} now"] * (one is not other)
        else:
            found += differences(one, other, same)
    if found:
        raise ResultError(f"{folder} was begun with something else, and cannot go on here: {'; '.join(found)}")


def _given(args: argparse.Namespace, declare: Declare) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    declare(parser)
    defaults = vars(parser.parse_args([]))
    return {name: value for name, value in vars(args).items() if name in defaults and value != defaults[name]}

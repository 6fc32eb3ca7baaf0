"""`octavo stacks`: every combination of installed plugins, and whether it runs. Loads no torch: the device is what `--device` says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.cli import COMMANDS
from octavo.core.capabilities import DTYPES
from octavo.core.compat import StackReport, explain, reports
from octavo.core.errors import InvalidOptionsError
from octavo.core.registry import Registry
from octavo.core.sources.catalogue import CATALOGUE, DEFAULT_MODEL


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("stacks", help=COMMANDS["stacks"], description=COMMANDS["stacks"])
    parser.add_argument("--explain", action="store_true", help="say why a stack does not run, and what would mend it")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--device", default="cpu", help="judge for this device, there or not (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of weights, activations and KV (default: float32)")
    parser.add_argument("--model", metavar="FOLDER", help="judge for the model whose config.json is here (default: smollm2-135m's)")


def run(args: argparse.Namespace) -> int:
    """Print one line a stack. Returns 0 where at least one runs, else 1."""
    config = CATALOGUE[DEFAULT_MODEL].config if args.model is None else _read_config(Path(args.model))
    rows = list(reports(Registry.discover(), config, device=args.device, dtype=args.dtype, kv_dtype=args.dtype))
    if args.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2, ensure_ascii=False))
    else:
        _print_table(rows, explained=args.explain)
    return 0 if any(row.runs for row in rows) else 1


def _read_config(folder: Path) -> Any:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidOptionsError(f"--model {folder}: needs a folder with a config.json ({error})") from error


def _as_json(row: StackReport) -> dict[str, Any]:
    changes = [{change.kind: change.name} for change in row.changes]
    return {**row.stack.names, "runs": row.runs, "problems": list(row.problems), "changes": changes}


def _print_table(rows: list[StackReport], *, explained: bool) -> None:
    width = max((len(str(row.stack)) for row in rows), default=0)
    for row in rows:
        print(f"{row.stack!s:<{width}}  {'runs' if row.runs else 'does not run'}")
        if explained and not row.runs:
            print("".join(f"    {line}\n" for line in explain(list(row.problems), list(row.changes)).splitlines()[1:]), end="")
    print(f"{sum(row.runs for row in rows)} of {len(rows)} stacks run")

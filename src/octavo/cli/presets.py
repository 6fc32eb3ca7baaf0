"""`octavo presets`: the named configs, each as the TOML that it stands for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from octavo.cli import COMMANDS
from octavo.core.settings.presets import PRESETS


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("presets", help=COMMANDS["presets"], description=COMMANDS["presets"])
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    if args.json:
        rows = [{"name": p.name, "summary": p.summary, "settings": dict(p.settings)} for p in PRESETS.values()]
        print(json.dumps(rows, indent=2))
    else:
        print("\n\n".join(f"# {p.name}: {p.summary}\n{as_toml(p.settings)}" for p in PRESETS.values()))
    return 0


def as_toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections as a config file writes them, one a line: JSON's texts and whole numbers are TOML's too."""
    return "\n".join(
        f"{section} = {{ {', '.join(f'{name} = {json.dumps(value)}' for name, value in table.items())} }}"
        for section, table in settings.items()
    )

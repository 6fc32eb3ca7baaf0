"""`octavo schema`: the JSON schema of a config file, for the plugins that are installed."""

from __future__ import annotations

import argparse
import json
from typing import Any

from octavo.cli import COMMANDS
from octavo.core.registry import Registry
from octavo.core.settings.schema import json_schema


def add_parser(subparsers: Any) -> None:
    """Declare the command; it has no arguments."""
    subparsers.add_parser("schema", help=COMMANDS["schema"], description=COMMANDS["schema"])


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(json_schema(Registry.discover()), indent=2, ensure_ascii=False))
    return 0

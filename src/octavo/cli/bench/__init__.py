"""`octavo bench`: one module a kind of measurement. Only the arguments are declared here; torch comes with the measurement.

Must not know: what is measured.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from octavo.cli import COMMANDS

KINDS = {
    "serve": "latency and throughput under load, of an engine in this process or of a server",
    "offline": "throughput of prompts that are all known beforehand",
    "latency": "the time that a batch of requests takes, alone",
    "startup": "from the start of a process to its first token",
}


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("bench", help=COMMANDS["bench"], description=COMMANDS["bench"])
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, summary in KINDS.items():
        kind = kinds.add_parser(name, help=summary, description=f"Measure {summary}.")
        importlib.import_module(f"octavo.cli.bench.{name}").add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    return int(importlib.import_module(f"octavo.cli.bench.{args.kind}").run(args))

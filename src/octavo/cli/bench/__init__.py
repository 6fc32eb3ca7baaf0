"""`octavo bench`: one module a kind of measurement, or a use of what was saved. Only the arguments are declared here; torch comes later.

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
USES = {
    "report": "write tables and plots of a saved result, as one HTML file and as Markdown",
    "compare": "say whether a result is slower than an older one, for CI too",
    "keep": "keep of a result only what compare needs, in one small file",
}


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("bench", help=COMMANDS["bench"], description=COMMANDS["bench"])
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    described = {name: f"Measure {summary}." for name, summary in KINDS.items()}
    described |= {name: f"{summary[0].upper()}{summary[1:]}." for name, summary in USES.items()}
    for name, summary in {**KINDS, **USES}.items():
        kind = kinds.add_parser(name, help=summary, description=described[name])
        importlib.import_module(f"octavo.cli.bench.{name}").add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    return int(importlib.import_module(f"octavo.cli.bench.{args.kind}").run(args))

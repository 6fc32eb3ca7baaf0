"""`octavo doctor`: read a running server's metrics twice and judge its settings. Exit status 0: all is well, 1: findings, 2: unreadable."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from octavo.cli import COMMANDS


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("doctor", help=COMMANDS["doctor"], description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("url", metavar="URL", help="address of an Octavo or vLLM server, such as http://localhost:8000")
    parser.add_argument("--interval", type=_seconds, default=10.0, metavar="S", help="seconds between the two readings (default: 10)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token, where a proxy in front wants one")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and 3600")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the judgements."""
    from octavo.server.doctor import UnreadableError, metrics_url, read_twice

    try:
        diagnosis = read_twice(metrics_url(args.url), interval_s=args.interval, api_key=args.api_key)
    except UnreadableError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 2
    print(diagnosis.summary)
    for finding in diagnosis.findings:
        print(f"\n{finding.name}: {finding.figures}\n  -> {finding.advice}")
    return 1 if diagnosis.findings else 0

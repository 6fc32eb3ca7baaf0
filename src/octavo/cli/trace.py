"""`octavo trace anonymise`: reduce a request log to lengths and gaps, to be replayed by `octavo bench serve --dataset-name trace`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli import COMMANDS
from octavo.cli.settings import say
from octavo.core.errors import RequestError


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("trace", help=COMMANDS["trace"], description=COMMANDS["trace"])
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    text = "keep joint length buckets and gaps of a log; text, ids and dates stay behind"
    anonymise = what.add_parser("anonymise", help=text, description=f"{text[0].upper()}{text[1:]}.")
    anonymise.add_argument("log", metavar="IN", help="OpenAI-style JSONL, ShareGPT's JSON, or a CSV file of lengths")
    anonymise.add_argument("trace", metavar="OUT", help="the trace, a JSON file")
    anonymise.add_argument("--model", metavar="SOURCE", help="whose tokenizer counts the text of a log without token counts")
    anonymise.add_argument("--force", action="store_true", help="write over a file that is there")


def run(args: argparse.Namespace) -> int:
    """Write the trace and say what is in it."""
    from octavo.bench.request_logs import read_log
    from octavo.bench.traces import anonymise, save_trace

    if Path(args.trace).exists() and not args.force:
        raise RequestError(f"{args.trace} exists already: give another name, or --force to write over it", field="trace")
    encode = None
    if args.model is not None:
        from octavo.core.sources import resolve
        from octavo.core.text.tokenizer import Tokenizer

        encode = Tokenizer.from_folder(resolve(args.model).path).encode
    log = read_log(args.log, encode=encode)
    trace = anonymise(log)
    try:
        save_trace(trace, args.trace)
    except OSError as error:
        raise RequestError(f"{args.trace} cannot be written: {error.strerror}", field="trace") from None
    seconds = sum(row.gap_ms for row in trace.rows) / 1000
    pairs = len({(row.input_bucket, row.output_bucket) for row in trace.rows})
    later = sum(row.back > 0 for row in trace.rows)
    turns = f", {later} of them later turns of conversations," if later else ""
    say(f"{len(trace.rows)} requests{turns} over {seconds:.1f} s in {pairs} joint length buckets; {log.skipped} without lengths left out")
    return 0

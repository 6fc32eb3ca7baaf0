"""`octavo bench startup`: from the start of a process to its first token, in fresh processes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from octavo.bench.distribution import Distribution
from octavo.bench.probe import duration
from octavo.bench.startup import FIRST_TOKEN, STAGES, Start, StartupError, start_once
from octavo.cli.bench.json_figures import write_json
from octavo.cli.settings import add_config_arguments, config_words, say
from octavo.core.errors import EngineError, RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("--num-iters", type=int, default=3, metavar="INT", help="processes, one after the other (default: 3)")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--disable-tqdm", action="store_true", help="draw no progress bar")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print seconds to each stage: median, least and most. The first process may also wait for the disk, and counts like the others.

    After Ctrl-C they are of the processes that came to their end, and the status is 130.
    """
    if args.num_iters < 1:
        raise RequestError(f"--num-iters must be at least 1, not {args.num_iters}", field="num_iters")
    starts: list[Start] = []
    complete = False
    try:
        for start in _starts(args):
            starts.append(start)
        complete = True
    except KeyboardInterrupt:
        say(f"interrupted: {len(starts)} of {args.num_iters} processes came to their end")
    if starts:
        _tell(args, starts, complete=complete)
    return 0 if complete else 130


def _starts(args: argparse.Namespace) -> Iterator[Start]:
    """One after the other. Raises EngineError where one makes no token, KeyboardInterrupt after Ctrl-C."""
    with tqdm(total=args.num_iters, unit="process", desc="Starts", disable=True if args.disable_tqdm else None, dynamic_ncols=True) as bar:
        for number in range(args.num_iters):
            try:
                start = start_once(config_words(args))
            except StartupError as error:
                raise EngineError(str(error)) from None
            if number == 0 and args.num_iters > 1:
                say(f"This will take about {duration(start.first_token * (args.num_iters - 1))} more")
            bar.update()
            yield start


def _tell(args: argparse.Namespace, starts: Sequence[Start], *, complete: bool) -> None:
    stages = {
        stage: seen for stage in (*STAGES, FIRST_TOKEN) if (seen := Distribution(s.stages[stage] for s in starts if stage in s.stages))
    }
    print(f"{'seconds from the start of the process':<40} {'median':>8} {'least':>8} {'most':>8}")
    for stage, seen in stages.items():
        print(f"{stage:<40} {seen.median:>8.2f} {seen.values[0]:>8.2f} {seen.values[-1]:>8.2f}")
    if args.output_json is not None:
        figures = {"seconds": {stage: seen.values for stage, seen in stages.items()}, "num_iters": len(starts), "complete": complete}
        write_json(args.output_json, figures, identity=starts[0].identity())

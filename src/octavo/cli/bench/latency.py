"""`octavo bench latency`: how long one fixed batch takes, alone, again and again, in the words of `vllm bench latency`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from tqdm import tqdm

from octavo.bench.distribution import Distribution
from octavo.bench.probe import duration
from octavo.bench.workloads import make_work
from octavo.cli.bench.json_figures import write_json
from octavo.cli.settings import add_config_arguments, open_llm, say
from octavo.core.errors import EngineError, RequestError

if TYPE_CHECKING:
    from octavo.bench.work import Work
    from octavo.core.engine import Engine

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("batch")
    for flag, default, text in (
        ("--input-len", 32, "prompt tokens of each request"),
        ("--output-len", 128, "output tokens of each request"),
        ("--batch-size", 8, "requests at once"),
        ("--num-iters-warmup", 2, "batches that are not counted"),
        ("--num-iters", 10, "batches that are"),
        ("--seed", 0, "of the prompts' tokens"),
    ):
        group.add_argument(flag, type=int, default=default, metavar="INT", help=f"{text} (default: {default})")
    group.add_argument("--output-json", metavar="FILE", help="write the figures there too")
    group.add_argument("--disable-tqdm", action="store_true", help="draw no progress bar")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print mean and percentiles of the batches. The prefix cache is emptied before each.

    After Ctrl-C they are of the batches that are over, and the status is 130.
    """
    for flag in ("input_len", "output_len", "batch_size", "num_iters", "num_iters_warmup"):
        least = 0 if flag == "num_iters_warmup" else 1
        if getattr(args, flag) < least:
            raise RequestError(f"--{flag.replace('_', '-')} must be at least {least}, not {getattr(args, flag)}", field=flag)
    with open_llm(args) as llm:
        from octavo.bench.identity import identify

        engine = llm.engine
        options = {"input_len": args.input_len, "output_len": args.output_len}
        work = make_work("random", count=args.batch_size, vocab_size=engine.vocab_size, seed=args.seed, options=options)
        seconds: list[float] = []
        complete = False
        try:
            for took in _batches(args, engine, work):
                seconds.append(took)
            complete = True
        except KeyboardInterrupt:
            say(f"interrupted: {len(seconds)} of {args.num_iters} batches are over")
        if seconds:
            found = Distribution(seconds)
            print(f"Avg latency: {found.mean:.4f} seconds")
            for percent in PERCENTILES:
                print(f"{percent}% percentile latency: {found.percentile(percent):.4f} seconds")
            if args.output_json is not None:
                figures = {
                    "avg_latency": found.mean,
                    "latencies": seconds,
                    "percentiles": {str(percent): found.percentile(percent) for percent in PERCENTILES},
                    "workload_hash": work.digest,
                    "complete": complete,
                }
                write_json(args.output_json, figures, identity=asdict(identify(llm.built, work)))
    return 0 if complete else 130


def _batches(args: argparse.Namespace, engine: Engine, work: Work) -> Iterator[float]:
    """Seconds that each batch took which counts. Raises EngineError where a request has no answer, KeyboardInterrupt after Ctrl-C."""
    from octavo.bench.drive import drive

    total = args.num_iters_warmup + args.num_iters
    with tqdm(total=total, unit="batch", desc="Batches", disable=True if args.disable_tqdm else None, dynamic_ncols=True) as bar:
        for number in range(total):
            engine.kv.reset()
            records = drive(engine, work)
            if failed := next((record for record in records if not record.succeeded), None):
                raise EngineError(f"request {failed.index} of the batch has no answer: {failed.error or failed.finish_reason}")
            took = max(record.ended for record in records)
            if number == 0 and total > 1:
                say(f"This will take about {duration(took * (total - 1))} more: the first of {total} batches took {took:.2f} s")
            bar.update()
            if number >= args.num_iters_warmup:
                yield took

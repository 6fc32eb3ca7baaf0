"""`octavo bench latency`: how long one fixed batch takes, alone, again and again, in the words of `vllm bench latency`."""

from __future__ import annotations

import argparse

from tqdm import tqdm

from octavo.bench.distribution import Distribution
from octavo.bench.probe import duration
from octavo.bench.workloads import make_work
from octavo.cli.bench.offline import write_json
from octavo.cli.settings import add_config_arguments, open_llm, say
from octavo.core.errors import EngineError, RequestError

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
    """Print mean and percentiles of the batches. The prefix cache is emptied before each."""
    for flag in ("input_len", "output_len", "batch_size", "num_iters", "num_iters_warmup"):
        least = 0 if flag == "num_iters_warmup" else 1
        if getattr(args, flag) < least:
            raise RequestError(f"--{flag.replace('_', '-')} must be at least {least}, not {getattr(args, flag)}", field=flag)
    with open_llm(args) as llm:
        from octavo.bench.drive import drive

        engine = llm.engine
        options = {"input_len": args.input_len, "output_len": args.output_len}
        work = make_work("random", count=args.batch_size, vocab_size=engine.vocab_size, seed=args.seed, options=options)
        seconds: list[float] = []
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
                if number >= args.num_iters_warmup:
                    seconds.append(took)
                bar.update()
    found = Distribution(seconds)
    write_json(
        args.output_json,
        {
            "avg_latency": found.mean,
            "latencies": seconds,
            "percentiles": {str(percent): found.percentile(percent) for percent in PERCENTILES},
            "workload_hash": work.digest,
        },
    )
    print(f"Avg latency: {found.mean:.4f} seconds")
    for percent in PERCENTILES:
        print(f"{percent}% percentile latency: {found.percentile(percent):.4f} seconds")
    return 0

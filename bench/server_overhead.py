"""What the server costs: the same 64 requests offline, through HTTP, and streamed to 64 clients. `python -m octavo.bench.server_overhead`.

Three processes on one machine: the offline engine, the server, and this one, which is the client. They take turns, in another order each
round, and who waits uses no CPU. Printed are all tokens per second, prompt and output: medians over the rounds, and the median of the
rounds' ratios with its quartiles. A first round is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, cast

from octavo.bench.load.client import Record, run
from octavo.bench.load.http1 import connect, post
from octavo.bench.load.process import ServerProcess
from octavo.bench.load.workload import Lengths, completion, token_prompts
from octavo.core.processor import cpu_name

ARMS = ("offline", "whole", "streamed")
TARGETS = {"whole": 0.95, "streamed": 0.88}
Prompts = list[tuple[list[int], int]]


class Offline:
    """The engine without a server, in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "octavo.bench.server_overhead", "--offline", "--model", args.model, "--slots", str(args.slots)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._asks, self._tells = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        self._read()

    def measure(self, prompts: Prompts) -> float:
        """Seconds for all of them."""
        print(json.dumps(prompts), file=self._asks, flush=True)
        return self._read()

    def _read(self) -> float:
        line = self._tells.readline()
        if not line:
            raise RuntimeError("the offline engine ended; what it said is above")
        return float(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def offline(args: argparse.Namespace) -> int:
    """The other side of `Offline`: prompts in, seconds out, one line each."""
    from octavo import LLM, SamplingParams

    answers, sys.stdout = sys.stdout, sys.stderr
    with LLM(args.model, max_num_seqs=args.requests, num_kv_slots=args.slots, max_model_len=args.max_model_len) as llm:
        print(0.0, file=answers, flush=True)
        for line in sys.stdin:
            prompts = json.loads(line)
            llm.engine.kv.reset()
            params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in prompts]
            given = [{"prompt_token_ids": prompt} for prompt, _ in prompts]
            begun = time.perf_counter()
            made = llm.generate(given, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
            _check(sum(len(one.outputs[0].token_ids) for one in made), prompts)
            print(seconds, file=answers, flush=True)
    return 0


async def through(url: str, model: str, prompts: Prompts, *, stream: bool) -> float:
    """Seconds from the first request to the last answer, all sent at once."""
    connection = await connect(*_place(url))
    await connection.ask(post("/reset_prefix_cache", b"", host="x"))
    await connection.closed()
    asks = [completion(prompt, output, model=model, stream=stream) for prompt, output in prompts]
    gc.collect()
    records = await run(asks, url, clients=len(asks))
    _check_records(records, prompts)
    return max(record.ended for record in records) - min(record.sent for record in records)


def _place(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def _check_records(records: Sequence[Record], prompts: Prompts) -> None:
    errors = [record.error for record in records if record.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed, the first: {errors[0]}")
    _check(sum(record.num_tokens for record in records), prompts)


def _check(made: int, prompts: Prompts) -> None:
    if made != sum(output for _, output in prompts):
        raise RuntimeError(f"{made} tokens were made, not the {sum(output for _, output in prompts)} asked for")


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """All tokens per second of each arm, by round."""
    options: list[Any] = ["--model", args.model, "--max-num-seqs", args.requests, "--num-kv-slots", args.slots]
    options += ["--max-model-len", args.max_model_len, "--served-model-name", "m"]
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with ServerProcess([str(option) for option in options]) as server:
        engine = Offline(args)
        try:
            lengths = Lengths(prompt=(16, args.longest), output=(16, args.longest))
            prompts = list(token_prompts(seed=args.seed, count=args.requests, lengths=lengths, vocab_size=40_000))
            total = sum(len(prompt) + output for prompt, output in prompts)
            for number in range(args.rounds + 1):
                turn = number % len(ARMS)
                for arm in ARMS[turn:] + ARMS[:turn]:
                    if arm == "offline":
                        seconds = engine.measure(prompts)
                    else:
                        seconds = asyncio.run(through(server.url, "m", prompts, stream=arm == "streamed"))
                    print(f"round {number}: {arm} {total / seconds:.0f} tokens/s", file=sys.stderr, flush=True)
                    if number or not args.rounds:
                        found[arm].append(total / seconds)
        finally:
            engine.close()
    return found


def report(found: dict[str, list[float]], args: argparse.Namespace) -> None:
    """The table."""
    machine, rounds = f"{cpu_name()}, {os.cpu_count()} cores", f"{len(found['offline'])} rounds"
    print(f"{args.requests} requests of 16 to {args.longest} tokens in and out, {args.model}; {machine}; {rounds}")
    print(f"{'':<10}{'tokens/s':>10}{'of offline':>12}{'quartiles':>16}{'target':>8}")
    for arm in ARMS:
        ratios = sorted(one / other for one, other in zip(found[arm], found["offline"], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        spread = f"{low:.3f} to {high:.3f}" if arm != "offline" else ""
        print(f"{arm:<10}{statistics.median(found[arm]):>10.0f}{statistics.median(ratios):>12.3f}{spread:>16}{TARGETS.get(arm, ''):>8}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.server_overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=256, help="longest prompt and longest output, in tokens; the shortest are 16")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count; 0: one, without a first one before it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=40_000, help="size of the KV pool")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.offline:
        return offline(args)
    report(measure(args), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A long day in minutes: thousands of requests from many clients, many of them unruly. `python -m octavo.bench.soak --model FOLDER`.

Every answer is compared with what the offline engine gives for its prompt. At the end nothing may run or be held, every metric must agree
with the others and with what the clients saw, and the server's memory must not have grown in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from octavo.bench.load.books import Seen, audit, pages
from octavo.bench.load.http1 import BrokenAnswer
from octavo.bench.load.numbers import Numbers, numbers
from octavo.bench.load.process import ServerProcess
from octavo.bench.load.unruly import SHARES, Case, Client, Visit

LONGEST = 24  # tokens of an answer
SETTLE_S = 30.0  # until the last requests that nobody waits for are gone
SAMPLES = 100  # of the server's memory
GROWTH = 1.03  # of its median from the third to the last quarter; more is a leak
MODEL = "soak"
BUSY = ("num_requests_running", "num_requests_waiting", "http_requests_active")


def case_params(number: int) -> dict[str, Any]:
    """Every third case is greedy, the others draw, each with its own seed."""
    return {"temperature": 0} if number % 3 == 0 else {"temperature": 1.2, "seed": number, "top_p": 0.9}


def case_prompts(count: int, *, vocab_size: int, longest: int) -> Iterator[list[int]]:
    """Prompts of all lengths; some begin alike, so that they share blocks."""
    rng = random.Random(count)
    common = [rng.randrange(vocab_size) for _ in range(longest // 2)]
    for number in range(count):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest - len(common)))]
        yield common + own if number % 2 else own


@dataclass
class Outcome:
    """What a soak found."""

    visits: Counter[str] = field(default_factory=Counter)  # by kind
    problems: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # bytes, as the run goes on
    seconds: float = 0.0

    def judge_memory(self) -> None:
        """The last quarter may not lie above the one before."""
        quarter = len(self.memory) // 4
        if quarter < 5:
            return
        third, last = median(self.memory[-2 * quarter : -quarter]), median(self.memory[-quarter:])
        if last > third * GROWTH:
            self.problems.append(f"memory grew in the second half: {third / 2**20:.1f} to {last / 2**20:.1f} MiB")


async def soak(url: str, cases: Sequence[Case], *, requests: int, clients: int, seed: int = 0, model: str = MODEL) -> Outcome:
    """Visit, wait until it is quiet, and check what the server says of itself."""
    outcome, seen, rng = Outcome(), Seen(), random.Random(seed)
    kinds = rng.choices(list(SHARES), list(SHARES.values()), k=requests)
    visits = [
        Visit(kind=kind, case=rng.choice(cases), max_tokens=rng.randint(1, LONGEST), model=model, rng=random.Random(rng.random()))
        for kind in kinds
    ]
    todo = iter(enumerate(visits))
    host, _, port = url.removeprefix("http://").partition(":")

    async def work() -> None:
        client = Client(host, int(port), seen)
        for number, visit in todo:
            try:
                problem = await client.visit(visit)
            except (BrokenAnswer, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            outcome.visits[visit.kind] += 1
            if problem:
                outcome.problems.append(f"visit {number}, {visit.kind}: {problem}")
            if number % max(1, requests // SAMPLES) == 0:
                async with reading:
                    newest.append(await numbers(url))
                    outcome.problems += newest[-1].fallen(newest.pop(0))
                    outcome.memory.append(newest[0]["process_resident_memory_bytes"])
        await client.closed()

    begun, before = time.perf_counter(), await numbers(url)
    newest, reading = [before], asyncio.Lock()
    await asyncio.gather(*(work() for _ in range(clients)))
    outcome.seconds = time.perf_counter() - begun
    now = await settled(url)
    spent = time.perf_counter() - begun
    outcome.problems += audit(before, now, await pages(url), seen, seconds=spent, clients=clients)
    return outcome


async def settled(url: str) -> Numbers:
    """The numbers once nothing runs any more, or when patience ends."""
    end = time.monotonic() + SETTLE_S
    while True:
        now = await numbers(url)
        if not any(now[name] for name in BUSY) or time.monotonic() > end:
            return now
        await asyncio.sleep(0.1)


def offline_cases(model: str, count: int) -> list[Case]:
    """What the offline engine answers."""
    from octavo import LLM, SamplingParams

    with LLM(model, num_kv_slots=8192, max_model_len=256, device="cpu", dtype="float32") as llm:
        prompts = list(case_prompts(count, vocab_size=llm.engine.vocab_size, longest=64))
        params = [SamplingParams(max_tokens=LONGEST, ignore_eos=True, **case_params(number)) for number in range(count)]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        made = [output.outputs[0].token_ids for output in outputs]
    return [Case(prompt, case_params(number), ids) for number, (prompt, ids) in enumerate(zip(prompts, made, strict=True))]


def report(outcome: Outcome) -> int:
    """What was found; the exit status."""
    visits = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.visits.items()))
    print(f"{sum(outcome.visits.values())} visits in {outcome.seconds:.0f} s: {visits}")
    if outcome.memory:
        steps = outcome.memory[:: max(1, len(outcome.memory) // 8)]
        print("memory, MiB: " + ", ".join(f"{value / 2**20:.0f}" for value in steps))
    for problem in outcome.problems[:20]:
        print(problem)
    print(f"{len(outcome.problems)} problems")
    return 1 if outcome.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server, visit it, end it."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder with a tiny model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--cases", type=int, default=36, help="distinct prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    cases = offline_cases(args.model, args.cases)
    small_pool = ["--num-kv-slots", "1024", "--max-model-len", "256", "--max-num-seqs", "16", "--block-size", "4"]  # queues and preemption
    fixed = ["--model", args.model, "--served-model-name", MODEL, "--device", "cpu", "--dtype", "float32"]
    with ServerProcess([*fixed, *small_pool]) as server:
        outcome = asyncio.run(soak(server.url, cases, requests=args.requests, clients=args.clients, seed=args.seed))
        outcome.judge_memory()
        if (status := server.end()) != 0:
            outcome.problems.append(f"the server ended with status {status}:\n{server.log[-2000:]}")
    return report(outcome)


if __name__ == "__main__":
    sys.exit(main())

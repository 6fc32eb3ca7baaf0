"""What sharing saves of the KV cache: parallel samples and beams, beside the figures of the PagedAttention paper (its Fig. 15).

    python -m octavo.bench.sharing [--requests 1000] [--beam-requests 3] [--model smollm2-135m] [--spread 0.8]

The share saved is that of the allocator's own books (`KVUsage.saved`): of the slots that live sequences would hold if none were shared,
summed over all steps, each step counting alike. Samples run without a model, since what they share does not depend on their tokens. How
beams part does: they run on a real model, with prompts that it wrote itself. Lengths are lognormal with the means of the paper's two data
sets, every answer as long as drawn (EOS ignored). Must not know: plugins' insides.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from statistics import NormalDist
from typing import cast

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.clock import ManualClock
from octavo.core.descriptors import AllocatorPlugin, PoolShape, SchedulerPlugin
from octavo.core.engine import Engine
from octavo.core.execution import Handle, Runner, StepResult
from octavo.core.outputs import StepReport
from octavo.core.plan import BatchPlan
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM

WIDTHS = (2, 4, 6)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
OPENERS = ("The", "How do I", "Once upon a time", "In this article", "My question is", "Please write", "Dear", "A list of")


@dataclass(frozen=True, slots=True)
class DataSet:
    """Mean lengths of prompts and answers, and what the paper saved of its KV with 2 and with 6 sequences, in percent."""

    name: str
    prompt: int
    answer: int
    samples: tuple[float, float]
    beams: tuple[float, float]


DATA_SETS = (
    DataSet("Alpaca-like", 19, 58, (6.1, 9.8), (37.6, 55.2)),
    DataSet("ShareGPT-like", 161, 338, (16.2, 30.5), (44.3, 66.3)),
)


def lengths(mean: float, count: int, *, spread: float, rng: random.Random) -> list[int]:
    """`count` lengths at equal steps of a lognormal distribution's probability, shuffled; their logarithms have that standard deviation.

    Steps instead of draws, so that a few have the shape of many; scaled to the mean. At most half a context.
    """
    normal = NormalDist(0.0, spread)
    raw = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    scale = mean * count / sum(raw)
    found = [min(max(1, round(value * scale)), MAX_MODEL_LEN // 2) for value in raw]
    rng.shuffle(found)
    return found


class Saved:
    """An observer that adds up what sharing saves."""

    def __init__(self) -> None:
        self.saved = self.unshared = 0

    def octavo_step_finished(self, report: StepReport) -> None:
        """One step, whatever it takes."""
        usage = report.usage
        self.saved += usage.saved
        self.unshared += usage.filled + usage.held + usage.saved

    @property
    def share(self) -> float:
        """Of all slots times steps that would have been held."""
        return self.saved / self.unshared if self.unshared else 0.0


class _Done:
    """A step that was over at once."""

    transfers_done = 0

    def __init__(self, plan: BatchPlan) -> None:
        self._tokens = [[1] * chunk.sequence.request.width if chunk.sequence.request.samples_jointly else [1] for chunk in plan.chunks]

    def result(self) -> StepResult:
        """Token 1 for everybody."""
        return StepResult(self._tokens)


class _NoModel(Runner):
    def submit(self, plan: BatchPlan) -> Handle:
        return _Done(plan)


def share_of_samples(registry: Registry, requests: Iterable[tuple[int, int]], n: int) -> float:
    """What n samples of each request save; requests as (prompt length, answer length), many at once."""
    scheduler = cast(SchedulerPlugin, registry.get("scheduler", "continuous"))
    allocator = cast(AllocatorPlugin, registry.get("allocator", "paged"))
    seats = 32 * n
    shape = PoolShape(num_slots=seats * MAX_MODEL_LEN, num_host_slots=0, max_model_len=MAX_MODEL_LEN, max_num_seqs=seats)
    kv = allocator.build(allocator.options.model_validate({"block_size": BLOCK_SIZE}), shape)
    engine = Engine(
        scheduler=scheduler.build(scheduler.options(max_num_seqs=seats, max_num_batched_tokens=2 * MAX_MODEL_LEN), kv),
        kv=kv,
        runner=_NoModel(),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=2,
        clock=ManualClock(),
    )
    saved = Saved()
    engine.observers.add(saved)
    for prompt, answer in requests:
        engine.add_request([0] * prompt, SamplingParams(n=n, max_tokens=answer, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return saved.share


def write_prompts(llm: LLM, sizes: Seq[int]) -> list[list[int]]:
    """Prompts of these lengths in the model's own words, each continued at temperature 1 from a few words."""
    params = [SamplingParams(max_tokens=size, seed=number, ignore_eos=True) for number, size in enumerate(sizes)]
    openers = [OPENERS[number % len(OPENERS)] for number in range(len(sizes))]
    outputs = llm.generate(openers, params, use_tqdm=False)
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids][:size] for o, size in zip(outputs, sizes, strict=True)]


def share_of_beams(llm: LLM, prompts: Seq[Seq[int]], answers: Seq[int], width: int) -> float:
    """What searches of that width save; without a prefix cache, so that prompts share nothing with each other."""
    saved = Saved()
    llm.engine.observers.add(saved)
    try:
        params = [BeamSearchParams(beam_width=width, max_tokens=answer, ignore_eos=True) for answer in answers]
        llm.beam_search([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    finally:
        llm.engine.observers.remove(saved)
    return saved.share


def row(data: DataSet, what: str, shares: Iterable[float], paper: tuple[float, float]) -> str:
    """A line of the table."""
    cells = " | ".join(f"{100 * share:.1f}" for share in shares)
    return f"| {data.name} ({data.prompt} in, {data.answer} out) | {what} | {cells} | {paper[0]} to {paper[1]} |"


def main(argv: Seq[str] | None = None) -> int:
    """Print the table, line by line as it is known."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.sharing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="requests whose samples are counted")
    parser.add_argument("--beam-requests", type=int, default=3, help="requests that beam search runs on the model; 0: none")
    parser.add_argument("--model", default="smollm2-135m", help="of the beams")
    parser.add_argument("--spread", type=float, default=0.8, help="standard deviation of the lengths' logarithms")
    parser.add_argument("--seed", type=int, default=0, help="which prompt gets which answer")
    args = parser.parse_args(argv)
    print(f"KV slots saved by sharing, %: blocks of {BLOCK_SIZE}, spread {args.spread}, {args.requests} requests ({args.beam_requests})")
    print("| lengths | | " + " | ".join(map(str, WIDTHS)) + " | the paper, 2 to 6 |")
    print("|---" * (len(WIDTHS) + 3) + "|")
    registry = Registry.discover()
    for data in DATA_SETS:
        rng = random.Random(args.seed)
        drawn = [lengths(mean, args.requests, spread=args.spread, rng=rng) for mean in (data.prompt, data.answer)]
        requests = list(zip(*drawn, strict=True))
        print(row(data, "samples", [share_of_samples(registry, requests, n) for n in WIDTHS], data.samples), flush=True)
    if not args.beam_requests:
        return 0
    seats = max(WIDTHS) * args.beam_requests
    slots = seats * 1024  # shared as they are, beams never come near
    with LLM(
        args.model,
        scheduler="continuous",
        allocator={"plugin": "paged", "block_size": BLOCK_SIZE},
        max_num_seqs=seats,
        max_num_batched_tokens=2 * MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        num_kv_slots=slots,
    ) as llm:
        for data in DATA_SETS:
            rng = random.Random(args.seed)
            sizes, answers = (lengths(mean, args.beam_requests, spread=args.spread, rng=rng) for mean in (data.prompt, data.answer))
            prompts = write_prompts(llm, sizes)
            shares = [share_of_beams(llm, prompts, answers, width) for width in WIDTHS]
            print(row(data, f"beams ({args.model})", shares, data.beams), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

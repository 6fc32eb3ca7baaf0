"""What prompt lookup saves, on text that repeats its prompt and on free text. `python -m octavo.bench.speculation`.

Each task runs with and without drafts in turn, one request at a time and all together; medians of the rounds, the median of the
pairs' ratios with its range, and how many of the guessed tokens were right. Tokens must be the same ones, or nothing is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.run_totals import RunTotals
from octavo.core.assembly import build_engine, load_model
from octavo.core.outputs import RequestOutput
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.core.settings.flat import from_flat
from octavo.llm import LLM

PASSAGES = (
    "The lighthouse on the northern point was built in 1821. Its keeper wrote down the weather every morning, "
    "and his notes fill eleven volumes that are kept in the town's library.",
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative')\n    return width * height\n",
    "Monday: soup, bread and apples. Tuesday: rice, beans and pears. Wednesday: soup, bread and plums. Thursday: rice, beans and figs.",
)
TASKS = {
    "copying": tuple(
        f"Repeat the following text exactly.\n\nText:\n{passage}\n\nThe same text again:\n{passage[:24]}" for passage in PASSAGES
    ),
    "free text": (
        "Once upon a time, in a village between two rivers, there lived a miller who",
        "The most important lesson that I learned last year is that",
        "Dear editor, I am writing to you because",
    ),
}


@dataclass(slots=True)
class Measured:
    """One task, with or without drafts."""

    seconds: list[float] = field(default_factory=list)
    totals: RunTotals = field(default_factory=RunTotals)
    tokens: list[list[int]] = field(default_factory=list)


def measure(llms: dict[bool, LLM], prompts: Sequence[str], *, together: bool, rounds: int, max_tokens: int) -> dict[bool, Measured]:
    """Off, on, on, off, ...; a first round is not counted."""
    found = {False: Measured(), True: Measured()}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for number in range(rounds + 1):
        for on in (False, True) if number % 2 else (True, False):
            llm, measured, totals = llms[on], found[on], RunTotals()
            llm.engine.observers.add(totals)
            begun = time.perf_counter()
            outputs: list[RequestOutput] = []
            for batch in [list(prompts)] if together else [[prompt] for prompt in prompts]:
                outputs += llm.generate(batch, params, use_tqdm=False)
            elapsed = time.perf_counter() - begun
            llm.engine.observers.remove(totals)
            measured.tokens, measured.totals = [output.outputs[0].token_ids for output in outputs], totals
            if number:
                measured.seconds.append(elapsed)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each task and company. Returns 1 where drafts changed a token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    args = parser.parse_args(argv)
    registry = Registry.discover()
    settings: dict[str, Any] = {"model": args.model, "max_model_len": 512, "max_num_seqs": 8, "num_kv_slots": 4096, "allocator": "paged"}
    settings["dtype"] = "float32"  # in 16 bits a row's logits depend on the batch's shape, and tokens would differ at near-ties
    lookup = {"num_speculative_tokens": args.num_speculative_tokens}
    loaded = load_model(registry, load_config(registry, overrides=from_flat(**settings)))
    llms = {
        on: LLM.from_built(
            build_engine(
                registry, load_config(registry, overrides=from_flat(speculative_config=lookup if on else None, **settings)), loaded
            )
        )
        for on in (False, True)
    }
    for task, prompts in TASKS.items():
        for together in (False, True):
            found = measure(llms, prompts, together=together, rounds=args.rounds, max_tokens=args.max_tokens)
            off, on = found[False], found[True]
            if off.tokens != on.tokens:
                print(f"{task}: drafts changed the tokens: {off.tokens} became {on.tokens}")
                return 1
            ratios = [new / old for old, new in zip(off.seconds, on.seconds, strict=True)]
            print(
                f"{task}, {len(prompts)} requests {'together' if together else 'one by one'}: "
                f"{statistics.median(off.seconds):.2f} s in {off.totals.steps} steps without drafts, "
                f"{statistics.median(on.seconds):.2f} s in {on.totals.steps} with; "
                f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of {args.rounds} rounds; "
                f"{on.totals.accepted} of {on.totals.drafted} drafts right ({on.totals.acceptance:.0%})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

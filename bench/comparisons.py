"""The comparisons that people start with: one part changed, everything else kept. `python -m octavo.bench.comparisons NAME`.

Each runs two stacks on the same model, prompts and pool, in fp32, and prints what differs in steps and slots. Seconds are of one run each:
enough to see a direction, no benchmark.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.bench.run_totals import RunTotals
from octavo.core.assembly import LoadedModel, build_engine, load_model
from octavo.core.outputs import StepReport
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.core.settings.flat import from_flat
from octavo.llm import LLM

Work = list[tuple[list[int], int]]
"""Prompts as token ids, and how many tokens each is continued by."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two stacks that differ in one part, and what they are given to do, in rounds one after another."""

    question: str
    common: dict[str, Any]
    first: dict[str, Any]
    second: dict[str, Any]
    rounds: Callable[[], list[Work]]


def ids(length: int, *, start: int = 0) -> list[int]:
    """A prompt of this many tokens, any tokens."""
    return [1000 + (start + 7 * i) % 20_000 for i in range(length)]


COMPARISONS: dict[str, Comparison] = {
    "static-continuous": Comparison(
        question="What does a short answer cost that is batched with a long one?",
        common={"allocator": "paged", "max_num_seqs": 2, "max_model_len": 640, "num_kv_slots": 2560},
        first={"scheduler": "static"},
        second={"scheduler": "continuous"},
        rounds=lambda: [[(ids(16), 500), (ids(15, start=1), 20), *((ids(14, start=2 + i), 20) for i in range(24))]],
    ),
    "contiguous-paged": Comparison(
        question="How many requests does a pool of 2,048 slots hold at once?",
        common={"scheduler": "continuous", "max_num_seqs": 16, "max_model_len": 2048, "num_kv_slots": 2048},
        first={"allocator": "contiguous"},
        second={"allocator": "paged"},
        rounds=lambda: [[(ids(16, start=i), 15) for i in range(16)]],
    ),
    "paged-prefix": Comparison(
        question="What is computed again when prompts share their beginning?",
        common={"scheduler": "chunked", "max_num_seqs": 8, "max_model_len": 640, "num_kv_slots": 5120},
        first={"allocator": "paged"},
        second={"allocator": "prefix"},
        rounds=lambda: [[(ids(512) + ids(16, start=100 + i), 8)] for i in range(8)],
    ),
    "whole-chunked": Comparison(
        question="How long do others wait while a long prompt is computed?",
        common={"allocator": "paged", "max_num_seqs": 8, "max_model_len": 2048, "num_kv_slots": 8192},
        first={"scheduler": "continuous"},
        second={"scheduler": {"plugin": "chunked", "max_num_batched_tokens": 256}},
        rounds=lambda: [[(ids(1500), 8), *((ids(16, start=1 + i), 32) for i in range(7))]],
    ),
}


@dataclass(slots=True)
class Extremes:
    """An observer: the largest step, and the longest, in which somebody was decoding too."""

    tokens: int = 0
    seconds: float = 0.0
    at_once: int = 0

    def octavo_step_finished(self, report: StepReport) -> None:
        """Look at one step."""
        self.tokens = max(self.tokens, report.num_tokens)
        self.at_once = max(self.at_once, report.num_running)
        self.seconds = max(self.seconds, sum(report.seconds.values()))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One stack's run."""

    stack: str
    tokens: list[list[int]]
    totals: RunTotals
    extremes: Extremes
    computed: int
    seconds: float


def run(registry: Registry, loaded: LoadedModel, settings: dict[str, Any], rounds: list[Work]) -> Outcome:
    """All rounds on one engine."""
    config = load_config(registry, overrides=from_flat(dtype="float32", **settings))
    totals, extremes = RunTotals(), Extremes()
    made: list[list[int]] = []
    with LLM.from_built(build_engine(registry, replace(config, source=loaded.source.name), loaded)) as llm:
        llm.engine.observers.add(totals)
        llm.engine.observers.add(extremes)
        begun = time.perf_counter()
        for work in rounds:
            params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in work]
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False)
            made += [output.outputs[0].token_ids for output in outputs]
        seconds = time.perf_counter() - begun
        given = sum(len(prompt) for work in rounds for prompt, _ in work)
        computed = given - llm.engine.kv.stats().hit_tokens
        return Outcome(str(llm.built.config.stack), made, totals, extremes, computed, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one comparison. Returns 1 if the two stacks did not give the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=COMPARISONS)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args(argv)
    comparison = COMPARISONS[args.name]
    registry = Registry.discover()
    common = {"model": args.model, **comparison.common}
    loaded = load_model(registry, load_config(registry, overrides=from_flat(dtype="float32", **common)))
    outcomes = [run(registry, loaded, common | part, comparison.rounds()) for part in (comparison.first, comparison.second)]
    print(comparison.question + "\n")
    print(table(outcomes))
    same = outcomes[0].tokens == outcomes[1].tokens
    print(f"\nthe same tokens: {'yes' if same else 'NO'}")
    return 0 if same else 1


def table(outcomes: Sequence[Outcome]) -> str:
    """One column a stack."""
    rows: list[tuple[str, Callable[[Outcome], str]]] = [
        ("stack", lambda o: o.stack),
        ("steps", lambda o: str(o.totals.steps)),
        ("mean batch", lambda o: f"{o.totals.mean_batch:.2f}"),
        ("most requests at once", lambda o: str(o.extremes.at_once)),
        ("idle row-steps", lambda o: str(o.totals.idle_rows)),
        ("peak slots", lambda o: str(o.totals.peak_slots)),
        ("preemptions", lambda o: str(o.totals.preemptions)),
        ("prompt tokens computed", lambda o: str(o.computed)),
        ("largest step, tokens", lambda o: str(o.extremes.tokens)),
        ("longest step, s", lambda o: f"{o.extremes.seconds:.2f}"),
        ("all, s", lambda o: f"{o.seconds:.1f}"),
    ]
    cells = [[name, *(value(outcome) for outcome in outcomes)] for name, value in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(outcomes) + 1)]
    return "\n".join(
        "  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )


if __name__ == "__main__":
    sys.exit(main())

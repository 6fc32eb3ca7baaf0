"""What prefix caching costs where nothing is found.

    python -m octavo.bench.prefix_overhead [--host-only] [--host-rounds 41] [--rounds 9]

The host's own time of a step of 256 decoding rows without text, and the wall time of SmolLM2 on prompts that share nothing, each on
`paged` and `prefix` in turn; medians, and the median of the pairs' ratios with its quartiles. The step is the mean of those that decode
all rows from the first token to the last: 1 in 16 enters a block for every row, and the last one closes them all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

from octavo.bench.host_overhead import measure
from octavo.core.assembly import build_engine, load_model
from octavo.core.descriptors import AllocatorPlugin, SchedulerPlugin
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.core.settings.flat import from_flat
from octavo.llm import LLM

ALLOCATORS = ("paged", "prefix")
PARTS = ("schedule", "inputs", "apply")


def interleaved(name: str, once: Callable[[str], float], rounds: int, unit: str, scale: float) -> None:
    """Run both in turn, A B B A A B ..., and print medians and ratios."""
    seconds: dict[str, list[float]] = {allocator: [] for allocator in ALLOCATORS}
    for number in range(rounds):
        for allocator in ALLOCATORS if number % 2 == 0 else ALLOCATORS[::-1]:
            seconds[allocator].append(once(allocator))
    ratios = [new / old for old, new in zip(*seconds.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = ", ".join(f"{allocator} {statistics.median(values) * scale:.1f} {unit}" for allocator, values in seconds.items())
    print(f"{name}: {medians}; ratio {middle:.4f} (quartiles {low:.4f} to {high:.4f}) of {rounds} rounds")


def main(argv: Sequence[str] | None = None) -> int:
    """Print both, or the host's time alone, for which no model is needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--host-only", action="store_true", help="leave the model out")
    parser.add_argument("--host-rounds", type=int, default=41, help="of the host's time: short, so many")
    parser.add_argument("--rounds", type=int, default=9, help="of the wall time")
    args = parser.parse_args(argv)
    registry = Registry.discover()
    scheduler = cast(SchedulerPlugin, registry.get("scheduler", "continuous"))

    def host(allocator: str) -> float:
        plugin = cast(AllocatorPlugin, registry.get("allocator", allocator))
        times = measure(256, scheduler=scheduler, allocator=plugin, tokenizer=None, steps=160, middle=statistics.mean)
        return sum(times[part] for part in PARTS)

    host("paged"), host("prefix")  # warm-up
    interleaved("host, 256 rows, mean step", host, args.host_rounds, "us", 1e6)
    return 0 if args.host_only else measure_wall(registry, args.model, args.rounds)


def measure_wall(registry: Registry, model: str, rounds: int) -> int:
    """Print the wall time; 1 if something was found in the cache, so that the measurement isn't of what it says."""
    settings = {"model": model, "max_model_len": 512, "max_num_seqs": 8, "num_kv_slots": 4096}
    loaded = load_model(registry, load_config(registry, overrides=from_flat(**settings)))
    llms = {
        allocator: LLM.from_built(
            build_engine(registry, load_config(registry, overrides=from_flat(allocator=allocator, **settings)), loaded)
        )
        for allocator in ALLOCATORS
    }
    used = iter(range(1_000_000))

    def wall(allocator: str) -> float:
        start = next(used) * 4099
        prompts = [{"prompt_token_ids": [(start + 5407 * i + 31 * j) % 40_000 + 100 for j in range(200)]} for i in range(8)]
        begun = time.perf_counter()
        llms[allocator].generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begun

    wall("paged"), wall("prefix")  # warm-up
    interleaved("SmolLM2, 8 prompts of 200, 32 out", wall, rounds, "ms", 1e3)
    found = llms["prefix"].engine.kv.stats().hit_tokens
    print(f"tokens found in the cache: {found}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

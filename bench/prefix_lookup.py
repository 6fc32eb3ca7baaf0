"""What looking a long prompt up in a prefix cache costs the host: cold, warm, and again while the request waits.

    python -m octavo.bench.prefix_lookup [--tokens 100000] [--block-size 16]

Printed are the least of several runs, in milliseconds of CPU time. A printed benchmark and no test: it depends on the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence as Seq
from typing import cast

from octavo.core.descriptors import AllocatorPlugin, PoolShape
from octavo.core.kv import Allocator
from octavo.core.registry import Registry
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams

RUNS = 5
HASHES = ("sha256", "xxh3+compare")


def milliseconds(act: Callable[[], object]) -> float:
    """CPU time of one call."""
    begun = time.process_time()
    act()
    return (time.process_time() - begun) * 1e3


def prompt(tokens: int) -> Sequence:
    """A request's only sequence, its tokens without a pattern; the same each time."""
    ids = tuple(position * 7919 % 49_152 for position in range(tokens))
    return Request("r", ids, SamplingParams(max_tokens=1), 1, seed=0).sequences[0]


def measure(kv: Allocator, tokens: int) -> dict[str, float]:
    """Milliseconds of each call, the least of RUNS where it can be repeated."""
    first = prompt(tokens)
    times = {"cold open": milliseconds(lambda: kv.open(first))}
    kv.reserve(first, 0, tokens)
    times["commit"] = milliseconds(lambda: kv.commit(first, tokens))
    times["close"] = milliseconds(lambda: kv.close(first))
    warm, again = [], []
    for _ in range(RUNS):
        other = prompt(tokens)
        warm.append(milliseconds(lambda other=other: kv.open(other)))  # type: ignore[misc]
        kv.close(other)
        again.append(milliseconds(lambda other=other: kv.open(other)))  # type: ignore[misc]
        kv.close(other)
    return times | {"warm open": min(warm), "open again": min(again)}


def main(argv: Seq[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.prefix_lookup", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args(argv)
    plugin = cast(AllocatorPlugin, Registry.discover().get("allocator", "prefix"))
    pool = PoolShape(num_slots=2 * args.tokens, num_host_slots=0, max_model_len=args.tokens, max_num_seqs=1)
    print(f"a prompt of {args.tokens} tokens in blocks of {args.block_size}; milliseconds of CPU time")
    for name in HASHES:
        kv = plugin.build(plugin.options.model_validate({"hash": name, "block_size": args.block_size}), pool)
        print(f"{name:>14}: " + ", ".join(f"{what} {spent:.1f}" for what, spent in measure(kv, args.tokens).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

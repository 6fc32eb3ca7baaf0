"""What a cell's steps read and computed, beside what the device was seen to do.

Must not know: engines, files, tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.bench.ablation.breakdown import Breakdown
from octavo.bench.markdown import table

GIGA = 1e9
HEADS = [
    "cell", "steps that", "steps", "ms a step", "GB a step", "GB/s", "of the measured", "GFLOP a step", "GFLOP/s", "of the measured",
    "bound by memory", "of the roofline",
]  # fmt: skip
KINDS = {"decode": "decode", "prompts": "compute prompts"}


def rooflines(known: Mapping[str, Breakdown]) -> list[str]:
    """A line for each cell and kind of step, and what was measured; nothing where no cell's steps are known."""
    rows = [[name, KINDS[kind], *_figures(one, kind)] for name, one in known.items() for kind in KINDS if kind in one.roofline]
    if not rows:
        return []
    limits = dict.fromkeys(one.limits for one in known.values())
    measured = [
        f"Measured on this device: {one.bandwidth / GIGA:.1f} GB/s read, {one.flops / GIGA:.1f} GFLOP/s in {one.dtype}; ridge batch "
        f"{one.ridge_batch:.0f} (from so many tokens a step on arithmetic binds, below it the reading of weights)."
        for one in limits
    ]
    return [*measured, "", *table(HEADS, rows)]


def _figures(one: Breakdown, kind: str) -> list[str]:
    found, limits = one.roofline[kind], one.limits
    read, computed = (amount / found.seconds if found.seconds else 0.0 for amount in (found.num_bytes, found.flops))
    return [
        f"{found.steps}",
        f"{1000 * found.seconds / found.steps:.2f}",
        f"{found.num_bytes / found.steps / GIGA:.3f}",
        f"{read / GIGA:.1f}",
        f"{100 * read / limits.bandwidth:.0f} %",
        f"{found.flops / found.steps / GIGA:.3f}",
        f"{computed / GIGA:.1f}",
        f"{100 * computed / limits.flops:.0f} %",
        f"{100 * found.memory_bound / found.steps:.0f} %",
        f"{100 * found.share:.0f} %",
    ]

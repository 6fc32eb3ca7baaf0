"""The rows of the table: what is compared, what Octavo should reach at least (par) and what it aims at.

Must not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.bench.intervals import Interval
from octavo.bench.peers.tasks import AGAIN

OCTAVO, INT8, INT4 = "Octavo", "Octavo int8", "Octavo int4"
VLLM, LLAMA_CPP, HUGGING_FACE = "vLLM", "llama.cpp", "Hugging Face"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast as a peer, in the same work."""

    row: str  # by which it is chosen
    title: str
    timing: str  # see `Task.timings`
    unit: Literal["tok/s", "s"]  # of the absolute figures; tok/s counts output tokens
    peer: str
    par: float | None
    aim: float
    ours: str = OCTAVO

    @property
    def task(self) -> str:
        """What has to be run."""
        return self.timing.removesuffix(AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A figure of Octavo's own that should be low; what a peer has stands beside it."""

    row: str
    title: str
    unit: Literal["s", "MB"]
    peer: str
    par: float | None
    aim: float
    ours: str = OCTAVO


RATIOS: tuple[Ratio, ...] = (
    Ratio(row="mixed", title="64 at once, 16-256 in, 16-256 out", timing="mixed", unit="tok/s", peer=VLLM, par=1.2, aim=1.4),
    Ratio(row="eight", title="8 at once, 128 in, 128 out", timing="eight", unit="tok/s", peer=VLLM, par=1.3, aim=1.7),
    Ratio(row="one", title="one request, 16 in, 128 out", timing="one", unit="tok/s", peer=VLLM, par=1.5, aim=2.2),
    Ratio(row="one", title="the same, against the Q4_1 file", timing="one", unit="tok/s", peer=LLAMA_CPP, par=None, aim=1.0),
    Ratio(row="one", title="the same, weights in int8", timing="one", unit="tok/s", peer=LLAMA_CPP, par=None, aim=1.3, ours=INT8),
    Ratio(row="one", title="the same, weights in int4", timing="one", unit="tok/s", peer=LLAMA_CPP, par=None, aim=1.3, ours=INT4),
    Ratio(row="prompt", title="a prompt of 4,000 tokens, first token", timing="prompt", unit="s", peer=VLLM, par=1.3, aim=1.5),
    Ratio(row="prefix", title="64 after a common prefix of 512, cold", timing="prefix", unit="s", peer=VLLM, par=1.2, aim=1.5),
    Ratio(row="prefix", title="the same again, warm", timing="prefix" + AGAIN, unit="s", peer=VLLM, par=1.2, aim=1.5),
    Ratio(row="static", title="64 at once, against static batches", timing="mixed", unit="tok/s", peer=HUGGING_FACE, par=3.0, aim=4.5),
)
START = Limit(row="start", title="process start to first token", unit="s", peer=VLLM, par=4.0, aim=1.7)
MEMORY = Limit(row="memory", title="resident memory beyond weights and KV pool", unit="MB", peer=VLLM, par=None, aim=600)
ROWS = tuple(dict.fromkeys((*(claim.row for claim in RATIOS), START.row, MEMORY.row)))


def judge(ratio: Interval, *, par: float | None, aim: float) -> str:
    """Whether a ratio is as high as it should be. Where its interval holds the bound, the rounds leave it open, and that is said."""
    name, bound = ("aim", aim) if par is None or ratio.ratio >= par else ("par", par)
    if name == "par" or ratio.ratio >= aim:
        said = f"{name} met" if ratio.ratio >= bound else f"{name} missed by {bound - ratio.ratio:.2f}x"
    else:
        said = f"{'' if par is None else 'par met, '}aim missed by {aim - ratio.ratio:.2f}x"
    return said + (" (the interval holds it)" if ratio.low < bound <= ratio.high else "")


def judge_limit(value: float, claim: Limit) -> str:
    """Whether a figure is as low as it should be."""
    for name, bound in (("aim", claim.aim), ("par", claim.par)):
        if bound is not None and value <= bound:
            return f"{name} met" if name == "aim" else f"par met, aim missed by {value - claim.aim:.3g} {claim.unit}"
    name, bound = ("aim", claim.aim) if claim.par is None else ("par", claim.par)
    return f"{name} missed by {value - bound:.3g} {claim.unit}"


def engines_of(rows: Sequence[str]) -> dict[str, list[str]]:
    """Who has to do which task for these rows; those of START and MEMORY need engines, and MEMORY the mixed task."""
    found: dict[str, list[str]] = {}
    for claim in RATIOS:
        if claim.row in rows:
            engines = found.setdefault(claim.task, [])
            engines += [name for name in (claim.ours, claim.peer) if name not in engines]
    if MEMORY.row in rows:
        engines = found.setdefault("mixed", [])
        engines += [name for name in (MEMORY.ours, MEMORY.peer) if name not in engines]
    return found

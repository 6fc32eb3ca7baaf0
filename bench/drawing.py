"""What workloads draw from a seed: lengths and token ids. Each purpose has a stream of its own, so that changing one leaves the others.

Must not know: any workload.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

Encode = Callable[[str], list[int]]


class WorkloadOptions(BaseModel):
    """A workload's own options. An unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a workload is made for: how many requests, from which seed, of which token ids; `encode` where it reads text."""

    count: int
    seed: int
    vocab_size: int
    encode: Encode | None = None

    def stream(self, purpose: str) -> random.Random:
        """Random numbers for one purpose."""
        return random.Random(f"{self.seed}/{purpose}")

    def tokens(self, rng: random.Random, length: int) -> tuple[int, ...]:
        """Random ids. The first 256 are left out: special ones are often there."""
        return tuple(rng.choices(range(min(256, self.vocab_size // 2), self.vocab_size), k=length))


def lognormal(rng: random.Random, mean: float, cv: float) -> int:
    """A length of a lognormal distribution with this mean and coefficient of variation, at least 1. Without variation, the mean."""
    if cv == 0:
        return max(1, round(mean))
    variance = math.log1p(cv * cv)
    return max(1, round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))


def uniform(rng: random.Random, length: int, ratio: float) -> int:
    """A length between (1 - ratio) and (1 + ratio) times this one, at least 1."""
    return rng.randint(max(1, math.ceil(length * (1 - ratio))), max(1, math.floor(length * (1 + ratio))))

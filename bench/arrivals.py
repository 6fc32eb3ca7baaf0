"""When requests arrive: all at once, evenly, as a Poisson process, or in bursts.

Must not know: what arrives.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import accumulate

from octavo.bench.work import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How arrivals are spread over time. The first one is at 0.

    `rate` is the mean number a second; infinite: all at once. `burstiness` is the shape of the gamma distribution that the gaps are
    drawn from, as vLLM's flag: 1 is a Poisson process, less is more bursty (the gaps' coefficient of variation is 1 / sqrt(burstiness)),
    infinite is even. Raises ValueError.
    """

    rate: float = math.inf
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"a request rate must be above 0, not {self.rate}; inf sends all at once")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be above 0, not {self.burstiness}; 1 is a Poisson process, inf is even")

    def times(self, count: int, *, seed: int) -> list[float]:
        """Of so many arrivals, in seconds."""
        return list(accumulate(self.gaps(count - 1, seed=seed), initial=0.0))[:count]

    def gaps(self, count: int, *, seed: int) -> list[float]:
        """Seconds between arrivals."""
        if math.isinf(self.rate):
            return [0.0] * count
        if math.isinf(self.burstiness):
            return [1 / self.rate] * count
        rng = random.Random(f"{seed}/arrivals")
        return [rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness)) for _ in range(count)]

    def __str__(self) -> str:
        if math.isinf(self.rate):
            return "all at once"
        if math.isinf(self.burstiness):
            return f"{self.rate:g} a second, evenly"
        return f"{self.rate:g} a second, " + ("Poisson" if self.burstiness == 1 else f"gamma with burstiness {self.burstiness:g}")


def spread(items: list[Item], arrivals: Arrivals, *, seed: int) -> list[Item]:
    """Items whose `at` numbers their arrival get its time; those with one number arrive together. Sorted by time, `after` kept right.

    Later turns of a conversation are due after the turn before, and have no arrival of their own.
    """
    numbers = sorted({item.at for item in items if item.after is None})
    at = dict(zip(numbers, arrivals.times(len(numbers), seed=seed), strict=True))
    return in_order([item if item.after is not None else replace(item, at=at[item.at]) for item in items])


def in_order(items: list[Item]) -> list[Item]:
    """Sorted by `at`, a later turn behind the one before it, which `after` still names."""
    starts: list[float] = []
    for item in items:
        starts.append(item.at if item.after is None else max(item.at, starts[item.after]))
    order = sorted(range(len(items)), key=lambda index: (starts[index], index))
    place = {index: position for position, index in enumerate(order)}
    return [items[index] if items[index].after is None else replace(items[index], after=place[_after(items[index])]) for index in order]


def _after(item: Item) -> int:
    if item.after is None:
        raise ValueError("the first turn of a conversation comes after nothing")
    return item.after

"""Intervals of ratios over paired repeats (the bootstrap's, and Student's for a few repeats), and the verdict that they allow.

Repeats are paired: repeat i of both sides had the same work and ran next to each other, so that what slowed one down most likely slowed
down the other. The ratio is the geometric mean of the repeats' ratios: swapping the sides gives its inverse. Of many repeats the fifth with
the lowest ratios and the fifth with the highest are left out of it (a trimmed mean): on a machine with other tenants a few pairs are off by
a half, when something came for one of the two runs alone.
Must not know: what was measured, cells, engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
RESAMPLED = 6  # repeats from which on the bootstrap is used
TRIMMED = 16  # repeats from which on a mean leaves out a fifth at each end: with fewer, the interval would be wider and not narrower
LEVEL = 0.95
ALIKE = 0.05  # an interval within 1 / (1 + this) .. 1 + this says that there is no difference worth naming

Verdict = Literal["faster", "slower", "no difference beyond the noise", "too noisy to say"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and the bounds that hold the true one with probability `LEVEL`; without bounds (one repeat) they are 0 and infinity."""

    ratio: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        """The two sides differ, as far as chance goes."""
        return self.low > 1 or self.high < 1

    @property
    def is_narrow(self) -> bool:
        """Whatever the true ratio is, it is within `ALIKE` of 1."""
        return self.low >= 1 / (1 + ALIKE) and self.high <= 1 + ALIKE

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x [{self.low:.2f}, {self.high:.2f}]" if self.high < math.inf else f"{self.ratio:.2f}x"


def ratio_interval(
    candidate: Sequence[float], baseline: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> Interval:
    """candidate / baseline over paired repeats, all above 0.

    Percentiles of resampled means of log ratios, trimmed ones from `TRIMMED` repeats on. Plain percentiles are too narrow (they take the
    spread for known, and divide by n where n - 1 is right), so the percentiles asked for are those that would be right for normal noise:
    Hesterberg, "What Teachers Should Know About the Bootstrap" (2015), section 5.3. With fewer than `RESAMPLED` repeats no percentile is
    wide enough, since no resampled mean lies beyond the repeats themselves: there it is Student's interval of the log ratios, which takes
    their noise for normal.
    Raises ValueError where the sides do not pair up or a value is not above 0.
    """
    if len(candidate) != len(baseline) or not candidate:
        raise ValueError(f"repeats must come in pairs, not {len(candidate)} and {len(baseline)}")
    if not all(math.isfinite(value) and value > 0 for value in (*candidate, *baseline)):
        raise ValueError("a ratio needs values above 0 on both sides")
    logs = np.log(np.asarray(candidate, float)) - np.log(np.asarray(baseline, float))
    count = len(logs)
    ratio = math.exp(_middle(logs))
    if count == 1:
        return Interval(ratio, 0.0, math.inf)
    if count < RESAMPLED:
        half = _student(count - 1, level) * float(logs.std(ddof=1)) / math.sqrt(count)
        return Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half))
    picks = np.random.default_rng(seed).integers(0, count, (resamples, count))
    low, high = np.quantile(_middle(logs[picks]), _tails(count, level))
    return Interval(ratio, math.exp(low), math.exp(high))


def _middle(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Means over the last axis, of many values without the fifth at each end."""
    count = logs.shape[-1]
    cut = count // 5 if count >= TRIMMED else 0
    means: npt.NDArray[np.float64] = np.sort(logs)[..., cut : count - cut].mean(axis=-1)
    return means


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> tuple[float, float, float]:
    """Mean of repeats and the ends of its interval, by Student; of one repeat without ends."""
    found = np.asarray(values, float)
    mean = float(found.mean())
    if len(found) < 2:
        return mean, -math.inf, math.inf
    half = _student(len(found) - 1, level) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return mean, mean - half, mean + half


def verdict(interval: Interval, floor: Interval, *, higher_is_better: bool) -> Verdict:
    """What may be said of a ratio beside `floor`, the ratio of a baseline to itself.

    Faster or slower only where the interval leaves out 1 and everything that the baseline beside itself shows, in either direction.
    """
    noise = max(abs(math.log(floor.low)), abs(math.log(floor.high))) if floor.low > 0 and floor.high < math.inf else math.inf
    if math.isinf(interval.high) or math.isinf(noise):
        return "too noisy to say"
    if math.log(interval.low) > noise or math.log(interval.high) < -noise:
        return "faster" if (interval.low > 1) is higher_is_better else "slower"
    return "no difference beyond the noise" if interval.is_narrow and noise <= math.log(1 + ALIKE) else "too noisy to say"


@cache
def _tails(count: int, level: float) -> tuple[float, float]:
    """The two quantiles of resampled means that hold `level` of normal noise with `count` repeats."""
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * _student(count - 1, level))
    return tail, 1 - tail


def _student(freedom: int, level: float) -> float:
    """t with P(|T| < t) = level. With t = sqrt(freedom) tan(a), the density over the angle a is cos(a) ** (freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, 100_001)
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    return math.sqrt(freedom) * math.tan(float(np.interp(level, mass / mass[-1], angles)))

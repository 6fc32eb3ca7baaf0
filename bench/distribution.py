"""`Distribution`: many measured values as mean, median and percentiles; those that never came count as infinite.

Must not know: what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class Distribution:
    """Values in any unit, sorted, and the number of those that are missing since a request failed before it had one.

    A missing value is larger than any other: it moves percentiles, so that no engine looks faster for having failed. Only the mean is
    that of the values which are there.
    """

    def __init__(self, values: Iterable[float], *, missing: int = 0) -> None:
        self.values = sorted(values)
        self.missing = missing

    def __len__(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        """Of the values that are there; NaN without any."""
        return math.fsum(self.values) / len(self.values) if self.values else math.nan

    @property
    def median(self) -> float:
        """Half of all, the missing included, are at most this."""
        return self.percentile(50.0)

    def percentile(self, percent: float) -> float:
        """Between two values it is interpolated, as numpy does by default. Infinite among the missing, NaN without any value or miss."""
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile is between 0 and 100, not {percent}")
        count = len(self.values) + self.missing
        if not count:
            return math.nan
        below, share = divmod((count - 1) * percent / 100, 1)
        low, high = self._at(int(below)), self._at(min(int(below) + 1, count - 1))
        return low if share == 0 or low == high else low + (high - low) * share

    def _at(self, position: int) -> float:
        return self.values[position] if position < len(self.values) else math.inf

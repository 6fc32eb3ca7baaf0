"""Tables, times and GiB as our reports write them in Markdown.

Must not know: what is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

UNKNOWN = "-"
GIB = 1 << 30  # bytes


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns line up; nothing where there are no rows."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    if len(lines) == 1:
        return []
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    written = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return [written[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *written[1:]]


def time(seconds: float, *, digits: int = 0) -> str:
    """In ms with so many digits, from 1 s on in seconds; "never" where it is infinite, since so many requests failed."""
    if not math.isfinite(seconds):
        return "never" if seconds > 0 else UNKNOWN
    return f"{1000 * seconds:.{digits}f} ms" if seconds < 1 else f"{seconds:.2f} s"


P99_NEEDS = 100  # values: the 99th percentile of fewer is the largest, or between the largest two
FEW_VALUES = f"A p99 with a * is of fewer than {P99_NEEDS} values: the largest, or between the largest two."


def p99(seconds: float, *, count: int, digits: int = 0) -> str:
    """As `time`, marked where so few values say little of it."""
    text = time(seconds, digits=digits)
    return f"{text} *" if count < P99_NEEDS and text != UNKNOWN else text

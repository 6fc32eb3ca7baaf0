"""In which order cells run: interleaved, so that a machine that slows down slows all of them down.

Must not know: what a cell is.
"""

from __future__ import annotations

from collections.abc import Sequence


def order(names: Sequence[str], repeat: int) -> list[str]:
    """The names as they run in this repeat: begun one further each time, and every second time backwards.

    Nobody is always first, or always behind the same one.
    """
    start = repeat % len(names)
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if repeat % 2 else turned

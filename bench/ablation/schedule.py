"""In which order cells run: interleaved, so that a machine that slows down slows all of them down.

Must not know: what a cell is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def rotated(names: Sequence[str], repeats: int) -> Iterator[tuple[int, list[str]]]:
    """For each repeat the names in another order: begun one further each time, every second time backwards.

    Nobody is always first, or always behind the same one.
    """
    for repeat in range(repeats):
        start = repeat % len(names)
        order = [*names[start:], *names[:start]]
        yield repeat, order[::-1] if repeat % 2 else order

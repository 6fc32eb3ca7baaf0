"""A bar of requests that are over, on a terminal.

Must not know: what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from octavo.bench.records import RequestRecord


@contextmanager
def bar(total: int, *, shown: bool = True) -> Iterator[Callable[[RequestRecord], None]]:
    """Within the block, what it yields is told of each request that is over. Nothing is drawn where nobody looks."""
    failed = 0
    with tqdm(total=total, unit="request", desc="Requests", disable=None if shown else True, dynamic_ncols=True) as drawn:

        def over(record: RequestRecord) -> None:
            nonlocal failed
            if record.error:
                failed += 1
                drawn.set_postfix_str(f"{failed} failed", refresh=False)
            drawn.update()

        yield over

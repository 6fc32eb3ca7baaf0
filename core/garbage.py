"""Python's garbage collector, out of the way while it would only cost time.

Must not know: what is done meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_no_garbage(*, keep: bool = False) -> Iterator[None]:
    """Nothing is searched for garbage meanwhile; who had it off keeps it off.

    `keep`: what is there at the end stays as long as the process, and is not searched later either. Otherwise all that was made
    meanwhile is searched right afterwards.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        if keep:
            gc.freeze()
    finally:
        if was_on:
            gc.enable()

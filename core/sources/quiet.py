"""transformers without its own progress bars, which would be drawn across ours.

Must not know: what is loaded or converted. Imports transformers inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Within the block transformers draws none when it reads or writes weights; afterwards it does what it did before."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    with warnings.catch_warnings():  # the hub's client, which this switches too, warns where its environment variable says otherwise
        warnings.simplefilter("ignore")
        logging.disable_progress_bar()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.enable_progress_bar()

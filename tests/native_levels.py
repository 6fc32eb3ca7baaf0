"""Which levels of the native library a test can run at: the others are skipped with the reason."""

from __future__ import annotations

import pytest

from octavo.core.native import absence
from octavo.core.native.library import levels


def skip_unless_it_runs(level: str) -> None:
    """Skips the test where there is no library, or where this processor lacks the level."""
    if reason := absence():
        pytest.skip(reason)
    if level not in levels():
        pytest.skip(f"this processor has no {level}")

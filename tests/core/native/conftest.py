"""The library at each level that this processor runs."""

from __future__ import annotations

import pytest

from octavo.core.native import Library, load
from octavo.core.native.library import LEVELS
from tests.native_levels import skip_unless_it_runs


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Library:
    """Skipped where there is no compiler, and for levels of other processors."""
    skip_unless_it_runs(request.param)
    return load(request.param)

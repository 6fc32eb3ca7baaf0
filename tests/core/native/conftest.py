"""The library at each level that this processor runs."""

from __future__ import annotations

import pytest

from octavo.core.native import Library, absence, load
from octavo.core.native.library import levels


@pytest.fixture(params=["plain", "avx2", "avx512", "avx512_bf16"])
def library(request: pytest.FixtureRequest) -> Library:
    """Skipped where there is no compiler, and for levels of other processors."""
    if reason := absence():
        pytest.skip(reason)
    if request.param not in levels():
        pytest.skip(f"this processor has no {request.param}")
    return load(request.param)

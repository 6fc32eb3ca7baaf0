"""What tests of the CPU's plugins share: the levels of the native library, and torch's number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from octavo.core.native.library import LEVELS
from tests.native_levels import skip_unless_it_runs


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Each in turn; skipped where it cannot run."""
    skip_unless_it_runs(request.param)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, which is the native library's too, until the test is over."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

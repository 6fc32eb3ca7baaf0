"""Ops `cpu` as their tests have them."""

from __future__ import annotations

import pytest
import torch

from octavo.core.native import load
from octavo.plugins.ops.cpu.ops import CpuOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def ops(request: pytest.FixtureRequest, level: str) -> CpuOps:
    """At each level, in each type."""
    return CpuOps(load(level), request.param)


@pytest.fixture(autouse=True)
def _same_threads_afterwards(threads: object) -> None:
    """Every test leaves torch's number of threads as it was."""

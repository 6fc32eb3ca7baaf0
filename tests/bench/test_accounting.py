"""The account of a run is that of a recount of the whole pool at each step, and of a pencil."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.bench.accounting import SHARES, account
from octavo.bench.step_log import StepLog
from octavo.core.testing.rig import Rig
from tests.bench.pools import ALLOCATORS, random_run, rig

KINDS = ("plain", "forks", "drafts", "aborts", "failures")


@pytest.mark.parametrize("kind", (*KINDS, "swap", "beams"))
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_recount_of_the_pool_finds_the_same(allocator: str, kind: str) -> None:
    """Slots never written are those that no row and no fork ever filled while the block was held; the six sum to the pool."""
    preempted = 0
    for seed in range(6):
        log, recount, made = random_run(allocator, seed, kind="plain" if kind == "swap" else kind, host=100 if kind == "swap" else 0)
        found = account(log.lines)
        total = sum(found.series[name] for name in SHARES)
        assert (total == made.kv.capacity).all() and found.capacity == made.kv.capacity
        assert found.shares.total == pytest.approx(100, abs=1e-9) and found.undecided == 0
        assert all((found.series[name] >= 0).all() for name in SHARES)
        assert len(log.lines) == recount.steps
        if kind != "beams":  # of which some come and go while a step is applied, unseen
            assert found.series["internal"].tolist() == recount.never_written(), (allocator, kind, seed)
        preempted += found.num_preempted
    assert preempted or allocator.startswith("contiguous") or kind not in ("plain", "forks", "failures", "swap")

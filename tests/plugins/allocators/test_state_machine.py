"""Every allocator, whatever happens in whatever order, keeps each sequence's history apart and gives everything back."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.plugins.allocators.machine import AllocatorMachine
from tests.plugins.allocators.memory import ALLOCATORS

RUNS = int(os.environ.get("OCTAVO_STRESS_RUNS", "60"))


@pytest.mark.stress
@pytest.mark.parametrize("name", ALLOCATORS)
def test_random_lives(name: str) -> None:
    """Open, reserve, commit, fork, suspend, resume, fail and close at random; see the machine for what holds after each."""
    seen: Counter[str] = Counter()
    machine = type("Machine", (AllocatorMachine,), {"build": staticmethod(ALLOCATORS[name]), "seen": seen})
    rare = ("hit_tokens", "evictions") if name.startswith("prefix") and RUNS >= 1000 else ()  # a short run may miss these
    for _ in range(5):  # some sixty lives now and then have no transfer
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=RUNS, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)),
        )
        if seen["transfers"]:
            break
    for what in ("transfers", *rare):
        assert seen[what], f"no run had {what}"

"""Random workloads over all stacks give the tokens of unbatched decoding, keep all invariants, and leave nothing held.

`OCTAVO_STRESS_RUNS` sets how many runs (`make stress`); without it the fast tests do some 200 and the slow ones the rest of 1,000.
A failing run prints its case: `run(draw_case(seed, ...), stacks.make)` replays it.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from octavo.core.testing.random_runs import draw_case, run

PARTS = 4
STRESS_RUNS = int(os.environ.get("OCTAVO_STRESS_RUNS", "200"))


def run_all(numbers: range, stacks: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for number in numbers:
        case = draw_case(number, schedulers=stacks.schedulers, allocators=stacks.allocators)
        total.update(run(case, stacks.make).counts)
    return total


@pytest.mark.stress
@pytest.mark.parametrize("part", range(PARTS))
def test_random_runs(part: int, stacks: Any) -> None:
    """Every PARTS-th of the first STRESS_RUNS cases (fault 13); and 200 cases or more do what they are for."""
    seen = run_all(range(part, STRESS_RUNS, PARTS), stacks)
    if STRESS_RUNS >= 200:
        moves, scores = ("copy", "out", "in"), ("prompts scored", "tokens scored")
        for event in ("preempted", "rolled back", "aborted", "timed out", *moves, "placeholders", "hit_tokens", "evictions", *scores):
            assert seen[event], f"no run had: {event}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_more_random_runs(part: int, stacks: Any) -> None:
    """Up to 1,000 runs in all."""
    assert run_all(range(200 + part, 1000, PARTS), stacks)["runs"] == 200

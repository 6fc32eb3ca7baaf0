"""The worked example of docs/explanation/kv-accounting.md is what an engine and the account of its log give."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench.accounting import SHARES, KVAccount, account
from octavo.bench.step_log import StepLog
from octavo.core.sampling_params import SamplingParams
from tests.bench.pools import rig

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "kv-accounting.md").read_text()
STACKS = {"`contiguous`, max": "contiguous-max", "`contiguous`, request": "contiguous-request", "`paged`": "paged", "`prefix`": "prefix"}


def example(allocator: str) -> KVAccount:
    """A pool of 64 slots, a context of 32, blocks of 8. A: prompt 10, answer 5. B comes after A's first step: prompt 9, answer 3."""
    options = {"block_size": 8} if allocator in ("paged", "prefix") else {}
    made = rig(allocator, slots=64, max_model_len=32, **options)
    log, common = StepLog(0.0), [1, 2, 3, 1, 2, 3, 1, 2]
    with log.watching(made.engine):
        made.engine.add_request([*common, 3, 3], SamplingParams(max_tokens=5, ignore_eos=True, known_output_len=5))
        made.step()
        made.engine.add_request([*common, 1], SamplingParams(max_tokens=3, ignore_eos=True, known_output_len=3))
        made.finish()
    return account(log.lines)


def test_the_steps_of_the_paged_example() -> None:
    """A row a step, a column a share."""
    series = example("paged").series
    rows = [f"| {step + 1} | " + " | ".join(str(series[name][step]) for name in SHARES) + " |" for step in range(5)]
    assert "\n".join(rows) in PAGE


@pytest.mark.parametrize("name", STACKS)
def test_the_shares_of_each_allocator(name: str) -> None:
    """The means of the steps, which all take as long."""
    found = example(STACKS[name]).shares
    row = f"| {name} | " + " | ".join(f"{getattr(found, share):.1f}" for share in SHARES) + " |"
    assert row in PAGE, row


def test_what_the_prefix_cache_spared() -> None:
    """B finds A's first block, and holds one block less."""
    found = example("prefix")
    assert f"{found.prefix.hit_tokens} of {found.prefix.queried_tokens} prompt tokens" in PAGE
    assert f"{found.saved_slots:.1f} slots" in PAGE

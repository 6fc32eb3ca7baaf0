"""The account of a run is that of a recount of the whole pool at each step, and of a pencil."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.bench.accounting import SHARES, KVAccount, account, seconds_per_prompt_token
from octavo.bench.step_log import StepLog
from octavo.core.kv import KVStats
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
        assert all((found.series[name] >= 0).all() for name in SHARES) and not found.overdrawn.any()
        assert len(log.lines) == recount.steps
        if kind != "beams":  # of which some come and go while a step is applied, unseen
            assert found.series["internal"].tolist() == recount.never_written(), (allocator, kind, seed)
        preempted += found.num_preempted
    assert preempted or allocator.startswith("contiguous") or kind not in ("plain", "forks", "failures", "swap")


def accounted(made: Rig) -> KVAccount:
    """The account of what the rig was given to do."""
    log = StepLog(0.0)
    with log.watching(made.engine):
        made.finish()
    return account(log.lines)


def test_thirty_tokens_in_a_region_of_2048() -> None:
    """Prompt 16, answer 15: the last token's KV is not written, which makes 30 of 2,048; 2,018 are never used by anybody."""
    made = rig("contiguous-max", slots=2048, max_model_len=2048)
    made.add(16, 15)
    found = accounted(made)
    assert found.series["internal"].tolist() == [2018] * 15
    assert found.series["token_states"].tolist() == list(range(16, 31))
    assert found.series["reserved"].tolist() == list(range(14, -1, -1))
    assert found.shares.internal == pytest.approx(100 * 2018 / 2048)


def test_thirty_tokens_in_blocks_of_sixteen() -> None:
    """The second block comes with the 17th token; two of its slots are never used."""
    made = rig("paged", slots=2048, max_model_len=2048, block_size=16)
    made.add(16, 15)
    found = accounted(made)
    assert found.series["internal"].tolist() == [0] + [2] * 14
    assert found.series["token_states"].tolist() == list(range(16, 31))
    assert found.series["reserved"].tolist() == [0, *range(13, -1, -1)]
    assert found.series["free"].tolist() == [2032] + [2016] * 14


def test_seven_regions_of_the_papers_pool() -> None:
    """15,728 slots hold seven regions of 2,048; with an eighth request waiting, the 1,392 left over are external waste: 8.85 %."""
    made = rig("contiguous-max", slots=15_728, max_model_len=2048, max_num_seqs=256)
    for _ in range(8):
        made.add(4, 3)
    found = accounted(made)
    assert found.series["external"].tolist() == [1392] * 3 + [0] * 3  # nobody waits any more
    assert pytest.approx(8.85, abs=0.01) == 100 * 1392 / 15_728
    assert (found.series["token_states"] + found.series["reserved"]).tolist() == [7 * 6] * 3 + [6] * 3


def test_samples_share_their_prompt() -> None:
    """Three samples of 8 tokens in blocks of 4: two blocks are named three times from when they part, and none is copied."""
    made = rig("paged", slots=160)
    made.add(8, 3, n=3)
    found = accounted(made)
    assert (found.copies, found.undecided) == (0, 0)
    assert found.saved_slots == pytest.approx(2 / 3 * 16)
    assert found.share_saved == pytest.approx(32 / (32 + 8 + 2 * 20))


def test_what_a_prefix_cache_spared() -> None:
    """The second of two equal prompts finds both full blocks but computes its last token; cached blocks are nobody's."""
    made = rig("prefix", slots=40)
    log = StepLog(0.0)
    with log.watching(made.engine):
        made.add(9, 1)
        made.finish()
        made.add(9, 1)
        made.finish()
    found = account(log.lines)
    assert (found.prefix.queried_tokens, found.prefix.hit_tokens, found.prefix.evictions) == (18, 8, 0)
    assert found.prefix.hit_rate == 8 / 18
    assert found.series["cached"].tolist() == [0, 0]  # in the second step its two blocks are in use again
    assert log.lines[-1].usage.cached == 8
    later = StepLog(0.0)
    with later.watching(made.engine):
        made.add(9, 1)
        made.finish()
    assert account(later.lines).prefix.queried_tokens == 9, "what came before the log does not count"


def test_what_was_computed_again_is_counted() -> None:
    """Two requests outgrow the pool; the younger is preempted, and the 6 positions that it had are computed a second time."""
    made = rig("paged", slots=16)
    made.add(4, 8)
    made.add(4, 8)
    log = StepLog(0.0)
    with log.watching(made.engine):
        made.finish()
    found = account(log.lines)
    assert found.num_preempted == 1
    planned = sum(line.num_tokens for line in log.lines)
    assert found.num_recomputed == planned - 2 * (4 + 8 - 1) > 0


def test_steps_are_weighted_by_their_time() -> None:
    """A step that takes three times as long counts three times; on a clock that stands still all count alike."""
    made = rig("contiguous-max", slots=40)
    made.add(2, 2)
    log = StepLog(0.0)
    with log.watching(made.engine):
        made.finish()
    one, two = log.lines
    assert account(log.lines).shares.token_states == pytest.approx(100 * 2.5 / 40)
    lines = [replace(one, start=0.0, end=1.0), replace(two, start=5.0, end=8.0)]
    assert account(lines).shares.token_states == pytest.approx(100 * (0.25 * 2 + 0.75 * 3) / 40)


def test_no_log_and_a_changed_pool_are_errors() -> None:
    """They say so."""
    with pytest.raises(ValueError, match="no step was logged"):
        account([])
    made = rig("paged", slots=16)
    made.add(4, 2)
    log = StepLog(0.0)
    with log.watching(made.engine):
        made.finish()
    other = replace(log.lines[1], usage_running=replace(log.lines[1].usage_running, free=99))
    with pytest.raises(ValueError, match="16 slots in the first step"):
        account([log.lines[0], other])


def test_time_saved_is_at_the_pace_of_the_steps_that_computed_prompts() -> None:
    """Steps that only decode do not say what a prompt token costs."""
    log, _, _ = random_run("paged", 0, kind="plain")
    decoding = replace(log.lines[0], num_rows=2, num_tokens=2, num_drafted=0, seconds={"forward": 9.0}, stats=KVStats(100, 50))
    assert seconds_per_prompt_token([decoding]) == 0.0 == account([decoding]).prefix.seconds
    prompts = replace(decoding, num_tokens=100, seconds={"forward": 2.0, "apply": 1.0}, stats=KVStats(200, 60))
    assert account([decoding, prompts]).prefix.seconds == 60 * 2.0 / 100
    assert account([decoding, prompts]).prefix.hit_rate == 0.3

"""Among the sequences of one request: n samples part, a preempted family comes back. Blocks are asserted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.descriptors import PoolShape
from octavo.core.forks import common_prefix, rejoin, split
from octavo.core.request import Request, Sequence, Status
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.fake_model import decode_alone
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions
from octavo.plugins.schedulers.static import STATIC

PROMPT = (1, 2, 3, 1)


class RecordingKV:
    """Notes the order of calls; holds nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self.calls.append(("fork", parent.id, num_tokens))


def request(*, n: int = 1, max_tokens: int = 8) -> Request:
    return Request("r", PROMPT, SamplingParams(n=n, max_tokens=max_tokens), max_tokens=max_tokens, seed=0)


def parted(*outputs: list[int]) -> Request:
    """A family under way, its sequences with these outputs."""
    family = request(n=len(outputs))
    family.forked = True
    family.sequences = [Sequence(f"r/{i}", family, i, output=output) for i, output in enumerate(outputs)]
    for sequence in family.sequences:
        sequence.status, sequence.num_computed = Status.OPEN, sequence.num_tokens
    return family


def test_split_forks_the_lead() -> None:
    """All computed positions are shared, sample indices count up, the lead stays first."""
    kv, r = RecordingKV(), request(n=3)
    (lead,) = r.sequences
    lead.num_computed = 4
    family = split(kv, lead)  # type: ignore[arg-type]
    assert kv.calls == [("fork", "r/0", 4)] * 2
    assert family == r.sequences and [s.sample_index for s in family] == [0, 1, 2] and r.forked
    assert all((s.status, s.num_computed, s.num_scheduled) == (Status.OPEN, 4, 4) for s in family[1:])


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([[7], [8]], 4),  # they part with the first token
        ([[7, 7], [7, 8]], 5),
        ([[7], [7]], 4),  # equal so far: the last token is still to be run
        ([[7, 8, 9], [7]], 4),  # the shortest must run at least one
    ],
)
def test_common_prefix(outputs: list[list[int]], expected: int) -> None:
    """min(longest common prefix, shortest - 1)."""
    assert common_prefix(parted(*outputs).sequences) == expected


def test_rejoin_forks_at_the_common_prefix_even_if_the_lead_is_further() -> None:
    """A prefix cache may have given the lead more than the others share."""
    kv, r = RecordingKV(), parted([7, 7, 7], [7, 8], [7, 9])
    for sequence in r.sequences:
        sequence.new_epoch(Status.NEW)
    r.restore = 5
    r.sequences[0].num_computed = 6
    rejoin(kv, r)  # type: ignore[arg-type]
    assert kv.calls == [("fork", "r/0", 5)] * 2 and r.restore is None
    assert [(s.status, s.num_computed, s.num_scheduled) for s in r.sequences[1:]] == [(Status.OPEN, 5, 5)] * 2


def test_samples_share_the_prompt_and_copy_one_block_each(new_rig: Callable[..., Any]) -> None:
    """Four samples of a prompt of 2.5 blocks hold its 2 full blocks once, and a last block each; only the copies moved."""
    rig = new_rig(block_size=4)
    r = rig.add(10, 3, n=4)
    rig.step()
    assert len(r.sequences) == 4 and rig.kv.usage().filled + rig.kv.usage().held == 3 * 4
    rig.step()
    tables = [rig.runner.blocks(sequence) for sequence in r.sequences]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert [transfer.kind for transfer in rig.plans[-1].transfers] == ["copy"] * 3
    assert rig.kv.usage().filled + rig.kv.usage().held == (2 + 4) * 4
    rig.finish()
    assert rig.answers(r) == decode_alone(r)


def test_physical_blocks_of_four_samples(new_rig: Callable[..., Any]) -> None:
    """A prompt of 30 tokens in blocks of 16 is 2 blocks, shared by all four; the half-full one is copied at the first write (fault 49).

    What sharing saves is counted from references: 4 times 2 blocks named, 2 there; then 4 times 2 named, 5 there, and so on.
    """
    rig = new_rig(block_size=16, slots=512)
    r = rig.add(30, 10, n=4)
    used, saved, copied = [], [], []
    while rig.engine.has_work:
        rig.step()
        usage = rig.kv.usage()
        used.append((usage.filled + usage.held) // 16)
        saved.append(usage.saved // 16)
        copied.append(sum(transfer.count for transfer in rig.plans[-1].transfers) // 16)
    # the prompt; positions 30 and 31; 32 to 37; 38 (the last token's KV is not written, and the last step gives all back)
    assert used == [2, *[5] * 2, *[9] * 6, 0]
    assert saved == [6, *[3] * 2, *[3] * 6, 0]
    assert copied == [0, 3, *[0] * 8]
    assert rig.reports[0].usage.share_saved == 6 / 8 and rig.reports[1].usage.share_saved == 3 / 8
    assert rig.answers(r) == decode_alone(r)


def test_regions_save_nothing(new_rig: Callable[..., Any]) -> None:
    """Contiguous: four regions from the start."""
    rig = new_rig(
        kv=CONTIGUOUS.build(
            ContiguousOptions(reservation="request"), PoolShape(num_slots=512, num_host_slots=0, max_model_len=40, max_num_seqs=6)
        )
    )
    rig.add(30, 10, n=4)
    rig.finish()
    assert {report.usage.saved for report in rig.reports} == {0}
    assert max(report.usage.filled + report.usage.held for report in rig.reports) == 4 * 39


def test_a_fork_shares_only_what_is_computed(new_rig: Callable[..., Any]) -> None:
    """Blocks that the lead has reserved beyond its prompt are its own: the others take new ones, and nothing is copied."""
    rig = new_rig(STATIC, block_size=4)
    r = rig.add(8, 12, n=3)
    rig.step(2)
    tables = [rig.runner.blocks(sequence) for sequence in r.sequences]
    assert [len(table) for table in tables] == [5, 3, 3]
    assert len({tuple(table[:2]) for table in tables}) == 1 and len({table[2] for table in tables}) == 3
    assert rig.plans[-1].transfers == ()
    rig.finish()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("many", [{"n": 3}, {"beam_width": 3}])
def test_a_family_is_preempted_and_comes_back_as_a_whole(preemption: str, many: dict[str, int], new_rig: Callable[..., Any]) -> None:
    """In a pool where it fits only while sharing, it recovers sharing, and its tokens are those without preemption (fault 50)."""
    rig = new_rig(slots=60, host=60, block_size=4, preemption=preemption)
    first = rig.add(16, 20)
    group = rig.add(16, 12, **many)
    rig.finish()
    assert group.num_preemptions > 0 and first.num_preemptions == 0
    assert sum(report.num_failed for report in rig.reports) == 0
    assert (sum(report.transfers.get("out", 0) for report in rig.reports) > 0) == (preemption == "swap")
    assert rig.answers(group) == decode_alone(group) and rig.answers(first) == decode_alone(first)


def test_a_lead_that_finds_more_than_the_common_prefix(new_rig: Callable[..., Any], stacks: Any) -> None:
    """Its siblings fork at the common prefix, from a lead that a cache has brought further."""
    rig = new_rig(kv=stacks.sharing(128))
    rig.add(8, 20, seed=7)
    rig.step(3)
    group = rig.add(8, 12, n=2, seed=7)  # its lead samples what the first request samples
    rig.step(8)
    plan = rig.scheduler.plan()
    rig.scheduler.preempt(plan, group)
    plan.build()
    common = group.restore
    rig.step()
    lead, other = group.sequences
    assert group.restore is None and common is not None and common < 16
    chunks = {chunk.sequence: chunk for chunk in rig.plans[-1].chunks}
    assert chunks[lead].start == 12 and chunks[other].start == common
    rig.finish()
    assert rig.answers(group) == decode_alone(group)

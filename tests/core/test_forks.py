"""Among the sequences of one request: n samples part, beams advance, a preempted family comes back. Blocks are asserted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.forks import advance_beams, common_prefix, pick_beams, rejoin, split
from octavo.core.request import Request, Sequence, Status
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.fake_model import decode_alone
from octavo.plugins.schedulers.static import STATIC

PROMPT = (1, 2, 3, 1)


class RecordingKV:
    """Notes the order of calls; holds nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self.calls.append(("fork", parent.id, num_tokens))


def request(*, n: int = 1, beam_width: int = 0, max_tokens: int = 8, stop_ids: frozenset[int] = frozenset({0})) -> Request:
    return Request(
        "r", PROMPT, SamplingParams(n=n, max_tokens=max_tokens), max_tokens=max_tokens, seed=0, stop_ids=stop_ids, beam_width=beam_width
    )


def beams(width: int, *outputs: list[int]) -> Request:
    """A search under way, its beams with these outputs, each worth minus its place."""
    search = request(beam_width=width)
    search.forked = True
    search.sequences = [Sequence(f"r/{i}", search, output=output, score=-float(i)) for i, output in enumerate(outputs)]
    for beam in search.sequences:
        beam.status, beam.num_computed = Status.OPEN, beam.num_tokens
    return search


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
    assert common_prefix(beams(2, *outputs).sequences) == expected


def test_rejoin_forks_at_the_common_prefix_even_if_the_lead_is_further() -> None:
    """A prefix cache may have given the lead more than the others share."""
    kv, r = RecordingKV(), beams(3, [7, 7, 7], [7, 8], [7, 9])
    for beam in r.sequences:
        beam.new_epoch(Status.NEW)
    r.restore = 5
    r.sequences[0].num_computed = 6
    rejoin(kv, r)  # type: ignore[arg-type]
    assert kv.calls == [("fork", "r/0", 5)] * 2 and r.restore is None
    assert [(s.status, s.num_computed, s.num_scheduled) for s in r.sequences[1:]] == [(Status.OPEN, 5, 5)] * 2


def test_pick_beams_takes_the_best_and_those_that_ended_before_them() -> None:
    """An ended hypothesis counts only if it ranks before the last live one."""
    search = beams(2, [5], [6])
    first, second = search.sequences
    rows = [(first, [(0, -0.1), (7, -0.5), (8, -9.0)]), (second, [(7, -0.2), (0, -5.0)])]
    live, ended = pick_beams(search, rows)
    assert [(h.output, h.score) for h in live] == [([5, 7], -0.5), ([6, 7], -1.2)]
    assert [(h.output, h.parent) for h in ended] == [([5, 0], first)]


def test_pick_beams_does_not_depend_on_the_order_of_rows() -> None:
    """Ties are broken by tokens (known fault 37)."""
    search = beams(3, [5], [6], [7])
    for beam in search.sequences:
        beam.score = 0.0
    rows = [(beam, [(token, -1.0) for token in (3, 1, 2)]) for beam in search.sequences]
    expected = [h.output for h in pick_beams(search, rows)[0]]
    assert expected == [[5, 1], [5, 2], [5, 3]]
    for seed in range(5):
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert [h.output for h in pick_beams(search, shuffled)[0]] == expected


def test_dropped_beams_are_closed_before_new_ones_fork() -> None:
    """Else a search would need more room than its width."""
    kv, search = RecordingKV(), beams(3, [5], [6], [7])
    first, second, third = search.sequences

    def drop(sequence: Sequence) -> None:
        kv.calls.append(("drop", sequence.id, 0))
        search.sequences.remove(sequence)

    rows = [(first, [(1, -0.1), (2, -0.2), (3, -0.3)]), (second, [(1, -9.0)]), (third, [(1, -9.0)])]
    assert not advance_beams(kv, search, rows, drop=drop)  # type: ignore[arg-type]
    assert kv.calls == [("drop", "r/1", 0), ("drop", "r/2", 0), ("fork", "r/0", 5), ("fork", "r/0", 5)]
    assert [beam.output for beam in search.sequences] == [[5, 1], [5, 2], [5, 3]]
    assert len({beam.id for beam in search.sequences}) == 3


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_beam_search_at_any_width(width: int, new_rig: Callable[..., Any]) -> None:
    """Parents stay right: the result is that of a search without engine and cache (known fault 37)."""
    rig = new_rig()
    searches = [rig.add(length, 9, beam_width=width, ignore_eos=ignore) for length in (3, 8) for ignore in (False, True)]
    rig.finish()
    for search in searches:
        assert rig.answers(search) == decode_alone(search)
        scores = [output.cumulative_logprob for output in rig.outputs[search.id][0].outputs]
        assert len(scores) == width and scores == sorted(scores, reverse=True)


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

"""Forks on real tensors: n samples and beams over each allocator, copied, preempted and brought back, with the tokens of computing apart.

A test that passes with n separate requests tests no fork: who shares which blocks, and how much is copied, is asserted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from octavo.core.plan import BatchPlan
from octavo.core.request import Request, Sequence
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.schedulers.continuous import Continuous
from tests.models import PROMPTS
from tests.tensor_rig import TensorRig, make_kv

LAYOUTS = ["contiguous", "paged-1", "paged-4", "paged-16"]
KINDS: dict[str, dict[str, Any]] = {"n": {"n": 3, "temperature": 0.9, "seed": 5}, "beams": {"beam_width": 3}}
PROMPT = PROMPTS[4]  # 17 tokens: the last block of 4 or of 16 is not full
LENGTH, NEW = len(PROMPT), 10


class Restless(Continuous):
    """Admits one request a step, and then takes another off that it never took off before."""

    def schedule(self, now: float) -> BatchPlan:
        plan = self.plan()
        for request in list(self.running):
            self.grow(plan, request)
        admitted = None
        for request in self.queue():
            if self.admit(plan, request):
                admitted = request
                self.grow(plan, request)
            break
        victims = [r for r in self.running if r is not admitted and r.forked and not r.num_preemptions and len(r.sequences[0].output) > 1]
        if admitted is not None and victims:
            self.preempt(plan, victims[0])
        return plan.build()


class Watch:
    """How often the allocator forked and committed, by the number of the step."""

    def __init__(self, rig: TensorRig) -> None:
        self.forks, self.commits = Counter[int](), Counter[int]()
        kv, fork, commit = rig.kv, rig.kv.fork, rig.kv.commit

        def forks(parent: Sequence, child: Sequence, num_tokens: int) -> None:
            self.forks[len(rig.reports)] += 1
            fork(parent, child, num_tokens)

        def commits(sequence: Sequence, num_tokens: int) -> None:
            self.commits[len(rig.reports)] += 1
            commit(sequence, num_tokens)

        kv.fork, kv.commit = forks, commits  # type: ignore[method-assign]


def add(rig: TensorRig, kind: str, prompt: tuple[int, ...], max_tokens: int = NEW) -> Request:
    return rig.add(prompt, max_tokens, **KINDS[kind])


# --------------------------------------------------------------------- the works


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_fork_copy_preemption_and_commit_in_one_step(layout: str, kind: str, preemption: str) -> None:
    """All four in the same step, on a pool for hardly three requests; every token is that of computing it apart."""
    slots = {"contiguous": 184, "paged-1": 114, "paged-4": 124, "paged-16": 224}[layout]
    rig = TensorRig(make_kv(layout, slots, host=400), scheduler=Restless, preemption=preemption)
    watch = Watch(rig)
    requests = [add(rig, kind, PROMPTS[1]), add(rig, kind, PROMPTS[2]), add(rig, kind, PROMPT), add(rig, kind, PROMPTS[3])]
    rig.finish()
    assert [rig.tokens(request) for request in requests] == [rig.expected(request) for request in requests]
    copies = layout != "paged-1"  # blocks of one slot are full: nothing is ever copied
    together = [
        step
        for step, report in enumerate(rig.reports)
        if report.num_preempted and watch.forks[step] and watch.commits[step] and ("copy" in report.transfers) == copies
    ]
    assert together, [(report.num_preempted, watch.forks[step], report.transfers) for step, report in enumerate(rig.reports)]
    assert (rig.moved("out") > 0) == (rig.moved("in") > 0) == (preemption == "swap")
    assert rig.kv.stats().copies > 0 or not copies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_that_runs_dry_preempts_forks(layout: str, kind: str, preemption: str, depth: int) -> None:
    """The ordinary policy, preempting because it must. (Contiguous regions are reserved in full: their pool never runs dry.)"""
    slots = {"paged-1": 57, "paged-4": 72, "paged-16": 112}[layout]
    rig = TensorRig(make_kv(layout, slots, host=200), preemption=preemption, depth=depth)
    requests = [add(rig, kind, PROMPTS[1], 14), add(rig, kind, PROMPT, 14)]
    rig.finish()
    assert [rig.tokens(request) for request in requests] == [rig.expected(request) for request in requests]
    assert sum(report.num_preempted for report in rig.reports) > 0
    assert (rig.moved("out") > 0) == (rig.moved("in") > 0) == (preemption == "swap")


# ---------------------------------------------------------------- physical blocks


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_samples_share_the_blocks_of_their_prompt(block_size: int) -> None:
    """One copy of the prompt while nobody has written, then one last block each; the prompt's full blocks are shared to the end."""
    kv = make_kv(f"paged-{block_size}", 512)
    assert isinstance(kv, PagedAllocator)
    rig = TensorRig(kv)
    request = add(rig, "n", PROMPT)
    full, rest = divmod(LENGTH, block_size)

    def used() -> int:
        return (kv.capacity - kv.usage().free) // block_size

    rig.step()  # the prompt runs, three tokens are sampled, two sequences fork
    tables = [list(kv._tables[sequence].blocks) for sequence in request.sequences]
    assert len(tables) == 3
    assert tables[1] == tables[2] == tables[0]
    assert used() == len(tables[0]) == -(-LENGTH // block_size)
    rig.step()  # each writes its own token
    tables = [list(kv._tables[sequence].blocks) for sequence in request.sequences]
    assert len({tuple(table[:full]) for table in tables}) == 1
    assert len({table[full] for table in tables}) == 3
    assert used() == full + 3
    copied = 2 if rest else 0  # the last writer has the old block to itself
    assert kv.stats().copies == copied
    assert rig.moved("copy") == copied * block_size
    for layer in rig.runner.tensors.device:
        for tensor in layer:
            kept = [tensor[table[full] * block_size :][:rest] for table in tables]
            assert torch.equal(kept[0], kept[1])
            assert torch.equal(kept[0], kept[2])
    peak = used()
    while rig.engine.has_work:
        if request.sequences:
            blocks = [kv._tables[sequence].blocks for sequence in request.sequences]
            assert len({tuple(table[:full]) for table in blocks}) == 1
        peak = max(peak, used())
        rig.step()
    end = -(-(LENGTH + NEW - 2) // block_size)  # the last step takes its blocks and gives all back
    assert peak == full + 3 * (end - full) < 3 * end
    assert kv.stats().copies == copied
    assert rig.tokens(request) == rig.expected(request)


def test_samples_have_regions_of_their_own() -> None:
    """Contiguous: two copies of the prompt's region, in the step after the fork, and three regions from the start to the end."""
    kv = make_kv("contiguous", 512)
    rig = TensorRig(kv)
    request = add(rig, "n", PROMPT)
    region = LENGTH + NEW - 1
    rig.step()
    assert kv.capacity - kv.usage().free == 3 * region
    starts = [kv.region(sequence)[0] for sequence in request.sequences]
    assert len(set(starts)) == 3
    assert rig.moved("copy") == 0
    rig.step()
    assert (kv.stats().copies, rig.moved("copy")) == (2, 2 * LENGTH)
    for layer in rig.runner.tensors.device:
        for tensor in layer:
            lead, *others = [tensor[start : start + LENGTH] for start in starts]
            assert bool(lead.isfinite().all())
            assert all(torch.equal(lead, other) for other in others)
    rig.finish()
    assert (kv.stats().copies, rig.moved("copy")) == (2, 2 * LENGTH)
    assert rig.tokens(request) == rig.expected(request)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_never_hold_more_than_their_width(block_size: int) -> None:
    """Heirs share their parent's blocks and copy at most its last one: at any time fewer blocks than three requests would hold."""
    kv = make_kv(f"paged-{block_size}", 512)
    assert isinstance(kv, PagedAllocator)
    rig = TensorRig(kv)
    request = add(rig, "beams", PROMPT)
    full = LENGTH // block_size
    shared = 0
    while rig.engine.has_work:
        rig.step()
        if len(request.sequences) == 3:
            tables = [kv._tables[sequence].blocks for sequence in request.sequences]
            length = max(len(table) for table in tables)
            distinct = {block for table in tables for block in table}
            assert len({tuple(table[:full]) for table in tables}) == 1
            assert len(distinct) == (kv.capacity - kv.usage().free) // block_size <= full + 3 * (length - full) < 3 * length
            shared += 1
    assert shared == NEW - 1
    assert kv.stats().copies > 0 or block_size == 1
    assert rig.tokens(request) == rig.expected(request)

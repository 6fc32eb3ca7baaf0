"""Stacks of schedulers and allocators for engine tests with the fake runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.core.descriptors import PoolShape, SchedulerPlugin
from octavo.core.kv import Allocator
from octavo.core.options import SchedulerOptions
from octavo.core.request import Sequence
from octavo.core.scheduling import Scheduler
from octavo.core.testing.fake_runner import FailurePoint
from octavo.core.testing.mad_scheduler import MadScheduler
from octavo.core.testing.random_runs import CLASSES, MAX_MODEL_LEN, MAX_NUM_SEQS, Case
from octavo.core.testing.rig import Rig
from octavo.core.text.tokenizer import Tokenizer
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.prefix import PREFIX, PrefixOptions
from octavo.plugins.schedulers.chunked import CHUNKED
from octavo.plugins.schedulers.continuous import CONTINUOUS
from octavo.plugins.schedulers.static import STATIC

COMMON = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_MODEL_LEN, "order": "priority", "ageing": 4.0, "classes": CLASSES}


@dataclass(frozen=True)
class Policy:
    """A built-in scheduler with options, for tests that hold for all of them."""

    name: str
    plugin: SchedulerPlugin
    options: dict[str, Any]

    def build(self, kv: Allocator, **options: Any) -> Scheduler:
        """The scheduler on that pool."""
        return self.plugin.build(self.plugin.options(**(self.options | options)), kv)

    def rig(self, *, kv: Allocator | None = None, **options: Any) -> Rig:
        """An engine of it: `make_rig`, `options` winning over its own."""
        return make_rig(self.plugin, kv=kv, **(self.options | options))


POLICIES = {
    name: Policy(name, plugin, options)
    for name, plugin, options in (
        ("static", STATIC, {}),
        ("static-request", STATIC, {"release": "request", "dead_rows": "compute"}),
        ("static-window", STATIC, {"window_s": 5.0}),
        ("continuous", CONTINUOUS, {}),
        ("prefill-first", CONTINUOUS, {"mixing": "prefill_first"}),
        ("chunked", CHUNKED, {"max_num_batched_tokens": 8}),
        ("chunked-prefill-first", CHUNKED, {"max_num_batched_tokens": 11, "mixing": "prefill_first"}),
        (
            "chunked-long",
            CHUNKED,
            {
                "max_num_batched_tokens": 16,
                "long_prefill_token_threshold": 5,
                "max_num_partial_prefills": 2,
                "max_long_partial_prefills": 1,
            },
        ),
    )
}


def _scheduler(case: Case, kv: Allocator) -> Scheduler:
    """That of the case; `static-4` is a batch smaller than the seats."""
    common = COMMON | {"preemption": case.preemption}
    if case.scheduler == "mad":
        return MadScheduler(SchedulerOptions(**common), kv, seed=case.seed)
    if case.scheduler == "static-4":
        return POLICIES["static-request"].build(kv, **(common | {"batch_size": 4}))
    policy = POLICIES[case.scheduler]
    return policy.build(kv, **(common | policy.options))


class SharingAllocator(PagedAllocator):
    """Paged, and whoever opens finds the full blocks of the longest equal prefix that another live sequence has committed.

    The least of a prefix cache: enough to see who shares KV before it is written, and a lead that starts beyond its common prefix.
    """

    searching = True  # not while a sequence is opened on given blocks

    def __init__(self, *, capacity: int, block_size: int, host_capacity: int = 0) -> None:
        super().__init__(capacity=capacity, block_size=block_size, host_capacity=host_capacity)
        self.hits: list[int] = []  # of each search

    def open(self, sequence: Sequence) -> int:
        """Pinned by reference count; at least one token is left to compute."""
        tokens, longest, found = sequence.tokens(), 0, None
        for other, table in self._tables.items() if self.searching and sequence.request.reads_cache else ():
            known = other.tokens(0, table.num_filled)
            most = min(len(tokens) - 1, len(known))
            equal = next((i for i in range(most) if tokens[i] != known[i]), most) // self.block_size
            if equal > longest and other.request.cache_key == sequence.request.cache_key:
                longest, found = equal, table
        if self.searching:
            self.hits.append(longest * self.block_size)
        if found is None:
            return super().open(sequence)
        self.adopt(sequence, found.blocks[:longest], longest * self.block_size)
        return longest * self.block_size

    def adopt(self, sequence: Sequence, blocks: Seq[int], num_tokens: int) -> None:
        """As ever, and without a search."""
        self.searching = False
        super().adopt(sequence, blocks, num_tokens)
        self.searching = True


def _pool(slots: int, host: int) -> PoolShape:
    return PoolShape(num_slots=slots, num_host_slots=host, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)


TINY = {
    "contiguous-max": 125,
    "contiguous-request": 100,
    "contiguous-buddy": 100,
    "paged-1": 56,
    "paged-4": 56,
    "paged-16": 112,
    "sharing-4": 56,
    "prefix-1": 56,
    "prefix-4": 56,
    "prefix-16": 112,
}
"""Slots of a pool so small that requests preempt each other; those that can never fit are refused."""

ALLOCATORS: dict[str, Callable[[int, int], Allocator]] = {
    "contiguous-max": lambda slots, host: CONTIGUOUS.build(ContiguousOptions(reservation="max"), _pool(slots, host)),
    "contiguous-request": lambda slots, host: CONTIGUOUS.build(ContiguousOptions(reservation="request"), _pool(slots, host)),
    "contiguous-buddy": lambda slots, host: CONTIGUOUS.build(
        ContiguousOptions(reservation="request", placement="buddy"), _pool(slots, host)
    ),
    "paged-1": lambda slots, host: PAGED.build(PagedOptions(block_size=1), _pool(slots, host)),
    "paged-4": lambda slots, host: PAGED.build(PagedOptions(block_size=4), _pool(slots, host)),
    "paged-16": lambda slots, host: PAGED.build(PagedOptions(block_size=16), _pool(slots, host)),
    "sharing-4": lambda slots, host: SharingAllocator(capacity=slots, block_size=4, host_capacity=host),
    "prefix-1": lambda slots, host: PREFIX.build(PrefixOptions(block_size=1, eviction="lfu"), _pool(slots, host)),
    "prefix-4": lambda slots, host: PREFIX.build(PrefixOptions(block_size=4), _pool(slots, host)),
    "prefix-16": lambda slots, host: PREFIX.build(PrefixOptions(hash="xxh3+compare", eviction="fifo"), _pool(slots, host)),
}


class Stacks:
    """Names of all stacks, and the stack of a case."""

    policies = POLICIES
    schedulers = (*POLICIES, "static-4", "mad")
    allocators = tuple(ALLOCATORS)

    def make(self, case: Case) -> tuple[Scheduler, Allocator]:
        """A new scheduler and allocator."""
        slots = 512 if case.ample else TINY[case.allocator]
        kv = ALLOCATORS[case.allocator](slots, 112 if case.preemption == "swap" else 0)
        return _scheduler(case, kv), kv

    def make_kv(self, name: str) -> Allocator:
        """A tiny pool of that allocator."""
        return ALLOCATORS[name](TINY[name], 0)

    def sharing(self, slots: int) -> SharingAllocator:
        """A pool in which an equal prefix of a live sequence is found."""
        return SharingAllocator(capacity=slots, block_size=4)


@pytest.fixture(scope="session")
def stacks() -> Stacks:
    """All schedulers and allocators at hand."""
    return Stacks()


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    """Each built-in scheduler in turn, with several sets of options."""
    return POLICIES[request.param]


def make_rig(
    scheduler: SchedulerPlugin | Callable[[SchedulerOptions, Allocator], Scheduler] = CONTINUOUS,
    *,
    kv: Allocator | None = None,
    slots: int = 512,
    host: int = 0,
    block_size: int = 4,
    depth: int = 1,
    failures: Mapping[int, FailurePoint] | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Rig:
    """An engine of that scheduler with those options on a paged pool (or `kv`)."""
    kv = kv or PAGED.build(PagedOptions(block_size=block_size), _pool(slots, host))
    options = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_MODEL_LEN} | options
    if isinstance(scheduler, SchedulerPlugin):
        policy = scheduler.build(scheduler.options(**options), kv)
    else:
        policy = scheduler(SchedulerOptions(**options), kv)
    return Rig(policy, kv, max_model_len=MAX_MODEL_LEN, depth=depth, failures=failures, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def new_rig() -> Callable[..., Rig]:
    """`make_rig`, for the tests of this folder."""
    return make_rig

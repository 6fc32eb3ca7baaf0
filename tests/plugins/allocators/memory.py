"""A pool whose slots hold tags, and the allocators under test.

A position's tag depends on every token up to it, so whoever reads a slot that is not his, or not written yet, sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import numpy as np

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.descriptors import PoolShape
from octavo.core.kv import Allocator
from octavo.core.plan import Transfer
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.allocators.prefix import PREFIX, PrefixOptions

MAX_MODEL_LEN = 24


def paged(num_slots: int, *, block_size: int = 16, host: int = 0) -> Allocator:
    pool = PoolShape(num_slots=num_slots, num_host_slots=host, max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
    return PAGED.build(PagedOptions(block_size=block_size), pool)


def prefix(num_slots: int, *, block_size: int = 16, host: int = 0, **options: str) -> Allocator:
    pool = PoolShape(num_slots=num_slots, num_host_slots=host, max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
    return PREFIX.build(PrefixOptions.model_validate({"block_size": block_size, **options}), pool)


def contiguous(num_slots: int, *, max_model_len: int = MAX_MODEL_LEN, host: int = 0, **options: str) -> Allocator:
    pool = PoolShape(num_slots=num_slots, num_host_slots=host, max_model_len=max_model_len, max_num_seqs=8)
    return CONTIGUOUS.build(ContiguousOptions.model_validate(options), pool)


ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "paged-1": lambda: paged(44, block_size=1, host=28),
    "paged-4": lambda: paged(44, block_size=4, host=28),
    "paged-16": lambda: paged(80, block_size=16, host=48),
    "prefix-1": lambda: prefix(44, block_size=1, host=28, eviction="lfu"),
    "prefix-4": lambda: prefix(44, block_size=4, host=28),
    "prefix-8": lambda: prefix(64, block_size=8, host=40, eviction="fifo"),
    "prefix-compare": lambda: prefix(44, block_size=4, host=28, hash="xxh3+compare"),
    "contiguous-max": lambda: contiguous(110, host=28),
    "contiguous-request": lambda: contiguous(66, reservation="request", host=28),
    "contiguous-pow2": lambda: contiguous(110, reservation="pow2", host=28),
    "contiguous-oracle": lambda: contiguous(66, reservation="oracle", placement="buddy", host=28),
}
"""Pools that a few requests of MAX_MODEL_LEN fill. Another allocator is another line."""


def request(prompt: int | Iterable[int], max_tokens: int, *, n: int = 1, beam_width: int = 0, name: str = "r", salt: str = "") -> Request:
    """A request of `prompt` tokens 0, 1, 2 ..., or of these tokens."""
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, known_output_len=max_tokens, cache_salt=salt)
    return Request(name, tokens, params, max_tokens, seed=0, beams=BeamSearchParams(beam_width) if beam_width else None)


def start(kv: Allocator, one: Request, computed: int | None = None) -> Sequence:
    """Open the request's first sequence and write its first positions, the whole prompt unless told otherwise."""
    lead = one.sequences[0]
    kv.open(lead)
    compute(kv, lead, len(one.prompt) if computed is None else computed)
    return lead


def compute(kv: Allocator, sequence: Sequence, stop: int) -> None:
    """Reserve and commit up to `stop`; the output grows with it."""
    assert kv.reserve(sequence, sequence.num_computed, stop)
    sequence.num_computed = sequence.num_scheduled = stop
    kv.commit(sequence, stop)
    while sequence.num_tokens <= stop:
        sequence.output.append(1)


def fork(kv: Allocator, parent: Sequence, number: int = 1) -> Sequence:
    """A child that shares all that the parent has computed."""
    child = Sequence(f"{parent.request.id}/{number}", parent.request, number, output=list(parent.output))
    kv.fork(parent, child, parent.num_computed)
    child.num_computed = child.num_scheduled = parent.num_computed
    parent.request.sequences.append(child)
    return child


def blocks(kv: Allocator, sequence: Sequence) -> list[int]:
    """The sequence's block table."""
    return [int(block) for block in kv.table(sequence)[0]]


def family(kv: Allocator, prompt: int, *, n: int, max_tokens: int = 8) -> list[Sequence]:
    """A lead with its prompt computed, and n - 1 forks of it; each has sampled its first token."""
    lead = start(kv, request(prompt, max_tokens, n=n))
    sequences = [lead, *(fork(kv, lead, i) for i in range(1, n))]
    lead.request.forked = True
    return sequences


def tags(tokens: Iterable[int], one: Request | None = None) -> list[int]:
    """What the slots of these tokens' positions hold."""
    begin = hash(one.cache_key) if one is not None and one.cache_key else 0
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=begin))[1:]


class Memory:
    """Slots in the pool and on the host, and one reader's copies of the block tables."""

    def __init__(self, kv: Allocator) -> None:
        self.kv = kv
        self.pool: list[int | None] = [None] * kv.capacity
        self.host: list[int | None] = [None] * kv.host_capacity
        self._tables: dict[tuple[Sequence, int], np.ndarray] = {}

    def move(self, transfers: Iterable[Transfer]) -> None:
        """Apply transfers in order, each within its memory."""
        for transfer in transfers:
            source = self.host if transfer.kind == "in" else self.pool
            target = self.host if transfer.kind == "out" else self.pool
            assert transfer.count > 0
            assert 0 <= transfer.source <= len(source) - transfer.count, transfer
            assert 0 <= transfer.target <= len(target) - transfer.count, transfer
            target[transfer.target : transfer.target + transfer.count] = source[transfer.source : transfer.source + transfer.count]

    def slots(self, sequence: Sequence, stop: int) -> list[int]:
        """Where the first `stop` positions lie, from the region or from a copy of the table kept up to date by `dirty_from`."""
        if self.kv.layout == "region":
            first, length = self.kv.region(sequence)
            assert stop <= length, f"{sequence.id} was to use {stop} positions of a region of {length}"
            return list(range(first, first + stop))
        row, dirty_from = self.kv.table(sequence)
        assert row.dtype == np.int32
        copy = self._tables.get((sequence, sequence.epoch), row[:0])
        assert dirty_from <= len(copy), "entries that the reader has not seen are said to be unchanged"
        copy = np.concatenate([copy[:dirty_from], row[dirty_from:]])
        assert copy.tolist() == row.tolist(), f"dirty_from = {dirty_from} lies: the reader has {copy}, the table is {row}"
        self._tables[sequence, sequence.epoch] = copy
        size = self.kv.block_size
        assert stop <= size * len(copy), f"{sequence.id} was to use {stop} positions of {len(copy)} blocks"
        return [int(copy[p // size]) * size + p % size for p in range(stop)]

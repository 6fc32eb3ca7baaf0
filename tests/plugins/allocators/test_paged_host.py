"""Paged allocation: a group goes to host memory and comes back whole, sharing as it was, or stays as it is."""

from __future__ import annotations

import pytest

from octavo.plugins.allocators.paged.allocator import PagedAllocator
from tests.plugins.allocators.memory import blocks, compute, family, request, start


def pool(num_blocks: int, *, block_size: int = 4, host_blocks: int = 0) -> PagedAllocator:
    return PagedAllocator(capacity=num_blocks * block_size, block_size=block_size, host_capacity=host_blocks * block_size)


def test_a_group_is_suspended_once_a_block_and_comes_back_shared_as_it_was() -> None:
    kv = pool(8, host_blocks=4)
    lead, child = family(kv, 10, n=2)
    compute(kv, child, 11)
    kv.drain_transfers()
    assert kv.suspend([lead, child])
    assert [transfer.kind for transfer in kv.drain_transfers()] == ["out"] * 4  # two shared blocks and one of each
    assert (kv.usage().free, kv.usage().host) == (32, 16)
    assert kv.resume([lead, child]) == [10, 11]
    assert [transfer.kind for transfer in kv.drain_transfers()] == ["in"] * 4
    assert blocks(kv, lead)[:2] == blocks(kv, child)[:2]
    assert blocks(kv, lead)[2] != blocks(kv, child)[2]
    assert (kv.usage().filled, kv.usage().host) == (8 + 2 + 3, 0)
    assert kv.table(lead)[1] == 3
    kv.check()


@pytest.mark.parametrize("host_blocks", range(3))
def test_suspend_is_all_or_nothing(host_blocks: int) -> None:
    """Three distinct blocks: with room for fewer on the host nothing changes."""
    kv = pool(8, host_blocks=host_blocks)
    lead, child = family(kv, 10, n=2)
    before, tables = kv.usage(), [blocks(kv, lead), blocks(kv, child)]
    assert not kv.suspend([lead, child])
    assert kv.usage() == before
    assert [blocks(kv, lead), blocks(kv, child)] == tables
    assert kv.drain_transfers() == []
    kv.check()


@pytest.mark.parametrize("room", range(6))
def test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal(room: int) -> None:
    """Fault 51. Three sequences share 3 blocks, the last in part; to write on, all but one need a copy: 5 blocks, not 6."""
    kv = pool(5, host_blocks=3)
    sequences = family(kv, 10, n=3)
    assert kv.suspend(sequences)
    for sequence in sequences:
        sequence.num_computed = sequence.num_scheduled = 0
    other = start(kv, request(4 * (5 - room), 1, name="other")) if room < 5 else None
    kv.drain_transfers()
    before = kv.usage()
    counts = kv.resume(sequences)
    if room < 5:
        assert counts is None
        assert kv.usage() == before
        assert kv.drain_transfers() == []
        assert other is not None
        kv.close(other)
        counts = kv.resume(sequences)
    assert counts == [10, 10, 10]
    assert kv.usage().free == 0
    tables = [blocks(kv, sequence) for sequence in sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    kv.check()


def test_a_suspended_copy_can_be_closed() -> None:
    kv = pool(4, host_blocks=4)
    lead, child = family(kv, 10, n=2)
    assert kv.suspend([lead, child])
    kv.close(lead)
    assert kv.usage().host == 12
    kv.close(child)
    assert kv.usage().host == 0
    kv.check()


def test_a_member_alone_can_come_back() -> None:
    """The rest of its group stays on the host, with all it shares."""
    kv = pool(8, host_blocks=4)
    lead, child = family(kv, 10, n=2)
    assert kv.suspend([lead, child])
    assert kv.resume([child]) == [10]
    assert kv.usage().host == 12
    assert kv.resume([lead]) == [10]
    assert kv.usage().host == 0
    kv.check()

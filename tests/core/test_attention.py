"""Positions map to slots by the layout's formula, and a step's tokens to their destinations; both checked without any kernel."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.core.attention import AttentionMetadata, Destination
from octavo.core.errors import PluginContractError
from tests.plugins.kernels.cases import LAYOUTS, Layout, place


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_of_every_position(layout: Layout) -> None:
    """Every position of every row lies where the pool was filled, also when several rows are asked for at once."""
    totals = [1, 130, 16, 97]
    slots, fields, _ = place(totals, layout, random.Random(1))
    empty = torch.zeros(0, dtype=torch.int64)
    meta = AttentionMetadata(query_start=empty, seq_lens=empty, slots=empty, max_query_len=0, max_seq_len=130, **fields)
    for row, total in enumerate(totals):
        assert meta.slots_of(torch.full((total,), row), torch.arange(total)).tolist() == slots[row]
    last = meta.slots_of(torch.arange(4)[:, None], torch.tensor([[0], [129], [15], [96]]))
    assert last.dtype == torch.int64
    assert last.tolist() == [[row[-1]] for row in slots]


def test_slots_beyond_two_billion() -> None:
    """Block numbers are int32, slots are not."""
    empty = torch.zeros(0, dtype=torch.int64)
    table = torch.tensor([[2**30]], dtype=torch.int32)
    meta = AttentionMetadata(
        query_start=empty, seq_lens=empty, slots=empty, max_query_len=0, max_seq_len=1, block_table=table, block_size=16
    )
    assert meta.slots_of(torch.tensor([0]), torch.tensor([3])).tolist() == [2**34 + 3]


def test_a_layout_is_required() -> None:
    """Metadata without regions and without a block table is refused in words."""
    empty = torch.zeros(1, dtype=torch.int64)
    meta = AttentionMetadata(query_start=empty, seq_lens=empty, slots=empty, max_query_len=1, max_seq_len=1)
    with pytest.raises(PluginContractError, match="neither region_starts nor block_table; one of them must be set"):
        meta.slots_of(empty, empty)


@pytest.mark.parametrize(("slots", "expected"), [([2, 0], [2, -1, 1]), ([-1, 3, -1, 0], [4, -1, -1, 2]), ([-1], [-1]), ([], [-1])])
def test_destination(slots: list[int], expected: list[int]) -> None:
    """Token number i (counted from 1) is found at its slot, and a token of slot -1 nowhere."""
    cache = torch.full((max([*slots, 0]) + 1,), -1)
    Destination.of(torch.tensor(slots, dtype=torch.int64)).store(cache, torch.arange(1, len(slots) + 1))
    assert cache.tolist() == expected

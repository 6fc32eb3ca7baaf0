"""Plans become tensors: the example of the docs, random runs against a plain-Python expansion, and block tables that change."""

from __future__ import annotations

import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.errors import PluginContractError
from octavo.core.inputs import InputBuilder, StepInputs, ranges
from octavo.core.kv import Allocator
from octavo.core.plan import BatchPlan, Chunk
from octavo.core.request import Request, Sequence, Status
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing import random_runs
from octavo.core.testing.fake_runner import UNKNOWN, FakeHandle, FakeRunner, Row
from octavo.core.testing.random_runs import MAX_NUM_SEQS, Case, draw_case
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from tests.core.conftest import Stacks

CPU = torch.device("cpu")
SHAPES = Path(__file__).parents[2] / "docs" / "explanation" / "shapes.md"


def new_sequence(name: str, prompt: list[int], max_tokens: int = 8) -> Sequence:
    return Request(name, tuple(prompt), SamplingParams(temperature=0), max_tokens=max_tokens, seed=0).sequences[0]


def chunk_of(sequence: Sequence, start: int, length: int, **fields: Any) -> Chunk:
    return Chunk(sequence, start, length, start + length - 1, True, (), sequence.epoch)._replace(**fields)


# ------------------------------------------------------------------- directed


def test_the_small_step_of_the_shapes_page() -> None:
    """Every number that the page prints is what the builder makes of that plan."""
    printed = {line.split()[0]: line.partition(" ")[2] for line in SHAPES.read_text().split("```")[1].splitlines() if line.strip()}

    def numbers(name: str) -> list[int]:
        return [int(number) for number in re.findall(r"(?<![ab\d])\d+", printed[name])]

    a, b = new_sequence("a", [100, 101, 102, 103, 104, 105]), new_sequence("b", [200 + i for i in range(9)])
    b.output = [209]
    tables = {a: np.array([2, 5], dtype=np.int32), b: np.array([0, 3, 1], dtype=np.int32)}
    kv: Any = SimpleNamespace(layout="block_table", block_size=4, table=lambda sequence: (tables[sequence], 0))
    inputs = InputBuilder(kv, device=CPU, max_rows=2).build(BatchPlan((chunk_of(a, 0, 6), chunk_of(b, 9, 1))))
    meta = inputs.attention
    names = [f"{'ab'[token // 100 - 1]}{token % 100}" for token in inputs.input_ids.tolist()]
    assert names == printed["input_ids"].split()
    assert inputs.positions.tolist() == numbers("positions")
    assert meta.query_start.tolist() == numbers("query_start")
    assert meta.seq_lens.tolist() == numbers("seq_lens")
    assert meta.slots.tolist() == numbers("slots")
    assert inputs.logit_rows.tolist() == numbers("logit_rows")
    assert meta.block_table is not None
    rows = [row.split(", ") for row in re.findall(r"\[(.*?)\]", printed["block_table"])]
    for row, found in zip(rows, meta.block_table.tolist(), strict=True):
        assert all(entry in ("·", str(block)) for entry, block in zip(row, found, strict=True))
    assert (meta.max_query_len, meta.max_seq_len, meta.block_size, meta.region_starts) == (6, 10, 4, None)


def test_types_are_those_of_the_shapes_page() -> None:
    """int64 for ids, positions, rows and slots; int32 for the rest. The inputs survive pickling."""
    kv = PagedAllocator(capacity=64, block_size=4)
    sequence = new_sequence("a", [1, 2, 3])
    kv.open(sequence)
    kv.reserve(sequence, 0, 3)
    inputs = InputBuilder(kv, device=CPU, max_rows=2).build(BatchPlan((chunk_of(sequence, 0, 3),), dead_rows=1))
    meta = inputs.attention
    assert meta.block_table is not None
    for tensor in (inputs.input_ids, inputs.positions, inputs.logit_rows, meta.slots):
        assert tensor.dtype == torch.int64
    for tensor in (meta.query_start, meta.seq_lens, meta.block_table):
        assert tensor.dtype == torch.int32
    again = pickle.loads(pickle.dumps(inputs))
    assert again.attention.slots.tolist() == meta.slots.tolist() == [0, 1, 2, -1]


def test_ranges() -> None:
    """Empty ones take no place, none at all is an empty array."""
    found = ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist()
    assert found == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


def test_block_tables_grow_change_and_are_used_again() -> None:
    """More sequences than rows, tables wider than the array, a block replaced by copy on write, rows of the ended taken by others."""
    kv = PagedAllocator(capacity=4096, block_size=2)
    builder = InputBuilder(kv, device=CPU, max_rows=64)
    live: list[Sequence] = []

    def check() -> None:
        inputs = builder.build(BatchPlan(tuple(chunk_of(s, s.num_computed - 1, 1) for s in live)))
        assert inputs.attention.block_table is not None
        for sequence, row in zip(live, inputs.attention.block_table.tolist(), strict=True):
            blocks = kv._tables[sequence].blocks
            assert row[: len(blocks)] == blocks

    def start(name: str, length: int) -> None:
        sequence = new_sequence(name, list(range(length)))
        sequence.status, sequence.num_computed = Status.OPEN, length
        kv.open(sequence)
        assert kv.reserve(sequence, 0, length)
        kv.commit(sequence, length)
        live.append(sequence)

    for number in range(40):
        start(f"a{number}", 3 + number)
        check()
    parent = live[0]
    child = Sequence("child", parent.request, 1, status=Status.OPEN, num_computed=3)
    kv.fork(parent, child, 3)
    live.append(child)
    check()
    before = list(kv._tables[parent].blocks)
    parent.output.append(7)
    assert kv.reserve(parent, 3, 4)
    parent.num_computed = 4
    assert kv._tables[parent].blocks != before  # the shared last block was copied
    check()
    for sequence in live[1:30]:
        sequence.new_epoch(Status.DONE)
        kv.close(sequence)
    del live[1:30]
    for number in range(60):
        start(f"b{number}", 5)
        check()


def test_a_token_that_nobody_samples_is_an_error() -> None:
    """A plan that runs ahead of what is known and in flight is told with the sequence's name."""
    kv = PagedAllocator(capacity=64, block_size=4)
    sequence = new_sequence("lonely", [1, 2, 3])
    kv.open(sequence)
    kv.reserve(sequence, 0, 4)
    with pytest.raises(PluginContractError, match="'lonely/0': 1 tokens of a chunk are neither known nor sampled by a step in flight"):
        InputBuilder(kv, device=CPU, max_rows=2, depth=2).build(BatchPlan((chunk_of(sequence, 3, 1),)))


def test_what_was_forgotten_is_not_in_flight() -> None:
    """A token that an undone step would have sampled is asked for from nowhere."""
    kv = PagedAllocator(capacity=64, block_size=4)
    sequence = new_sequence("a", [1, 2, 3])
    kv.open(sequence)
    kv.reserve(sequence, 0, 4)
    first, second = BatchPlan((chunk_of(sequence, 0, 3),)), BatchPlan((chunk_of(sequence, 3, 1),))
    builder = InputBuilder(kv, device=CPU, max_rows=2, depth=2)
    place = builder.build(first).keep_at
    source = builder.build(second).input_from
    assert place is not None
    assert source is not None
    assert place.tolist() == source.tolist()
    builder.forget()
    with pytest.raises(PluginContractError, match="neither known nor sampled"):
        builder.build(second)


# ----------------------------------------------------------------- random runs


class CheckingRunner(FakeRunner):
    """A fake runner that also builds the inputs of each step and compares them with the rows of its own, made in plain Python."""

    def __init__(self, kv: Allocator, *, depth: int, seen: Counter[str], **options: Any) -> None:
        self.allocator = kv
        self.tables: dict[Sequence, Any] = {}  # what was read for this step; two readers share one reading
        shared: Any = SimpleNamespace(
            layout=kv.layout,
            block_size=kv.block_size,
            capacity=kv.capacity,
            host_capacity=kv.host_capacity,
            region=kv.region,
            table=self.tables.__getitem__,
        )
        super().__init__(shared, **options)
        self.builder = InputBuilder(shared, device=CPU, max_rows=MAX_NUM_SEQS, depth=depth)
        self.rows: list[Row] = []
        self.ring: list[tuple[int, int] | None] = [None] * (depth * MAX_NUM_SEQS)  # the step and row whose token stands there
        self.seen = seen

    def submit(self, plan: BatchPlan) -> FakeHandle:
        if self.allocator.layout == "block_table":
            self.tables.update({chunk.sequence: self.allocator.table(chunk.sequence) for chunk in plan.chunks})
        inputs = self.builder.build(plan) if plan.chunks else None
        self.rows, step = [], self.stats.steps
        try:
            return super().submit(plan)
        finally:
            if inputs is not None:
                self.compare(step, plan, inputs)

    def _snapshot(self, step: int, number: int, chunk: Chunk) -> Row:
        row = super()._snapshot(step, number, chunk)
        self.rows.append(replace(row, tokens=list(row.tokens)))
        return row

    def forget(self) -> None:
        super().forget()
        self.builder.forget()

    def compare(self, step: int, plan: BatchPlan, inputs: StepInputs) -> None:
        """Each tensor equals what a loop over the rows gives."""
        ids, places = inputs.input_ids.tolist(), [-1] * len(inputs.input_ids)
        if inputs.input_from is not None:
            places = inputs.input_from.tolist()
        query_start, logit_rows, slots, positions, draws = [0], list[int](), list[int](), list[int](), list[int]()
        scored: list[tuple[int, int]] = []
        for chunk, row in zip(plan.chunks, self.rows, strict=True):
            in_flight = [position for position, token in enumerate(row.tokens) if token == UNKNOWN]
            sampled_by = dict(zip(in_flight, row.sampled_by, strict=True))
            for position in range(row.start, row.stop):
                t = len(slots)
                if position in sampled_by:
                    assert self.ring[places[t]] == sampled_by[position]
                    self.seen[f"placeholders at depth {len(self.ring) // MAX_NUM_SEQS}"] += 1
                else:
                    assert (ids[t], places[t]) == (row.tokens[position], -1)
                if row.sampled_from is not None and position >= row.sampled_from:
                    logit_rows.append(t)
                if position in row.scored:
                    scored.append((t, row.prompt[position + 1]))
                slots.append(row.slots[position])
                positions.append(position)
            query_start.append(len(slots))
            draws.append(0 if row.sampled_from is None or row.num_candidates else len(row.draws) + len(row.drafts))
            self.seen.update(drafts=len(row.drafts), pieces=not chunk.samples, rows=1, scored=len(row.scored))
        dead = plan.dead_rows
        self.seen["dead rows"] += dead
        meta = inputs.attention
        assert inputs.positions.tolist() == positions + [0] * dead
        assert meta.slots.tolist() == slots + [-1] * dead
        assert meta.query_start.tolist() == query_start + [query_start[-1] + 1 + i for i in range(dead)]
        assert meta.seq_lens.tolist() == [row.stop for row in self.rows] + [0] * dead
        assert (ids[query_start[-1] :], places[query_start[-1] :]) == ([0] * dead, [-1] * dead)
        assert inputs.logit_rows.tolist() == logit_rows
        prompts = inputs.prompts
        assert ([] if prompts is None else list(zip(prompts.rows.tolist(), prompts.targets.tolist(), strict=True))) == scored
        assert inputs.draws == draws
        assert meta.max_query_len == max(chunk.length for chunk in plan.chunks)
        assert meta.max_seq_len == max(row.stop for row in self.rows)
        for b, row in enumerate(self.rows):
            found = meta.slots_of(torch.full((row.stop,), b), torch.arange(row.stop)).tolist()
            assert found == row.slots
        self.keep(step, inputs)

    def keep(self, step: int, inputs: StepInputs) -> None:
        """What a device does with the step's draws."""
        if inputs.keep_at is None or inputs.keep_draws is None:
            assert len(self.ring) == MAX_NUM_SEQS
            return
        owner = [row for row, count in enumerate(inputs.draws) for _ in range(count)]
        for draw, place in zip(inputs.keep_draws.tolist(), inputs.keep_at.tolist(), strict=True):
            self.ring[place] = (step, owner[draw])


def test_inputs_of_random_runs_equal_a_plain_expansion(stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts, pieces of prompts, forks, beams, drafts, dead rows, preemption, failed steps, one to three steps in flight."""
    seen: Counter[str] = Counter()
    for number in range(90):
        case: Case = draw_case(random.Random(number).randrange(10**6), schedulers=stacks.schedulers, allocators=stacks.allocators)

        def make(kv: Allocator, case: Case = case, **options: Any) -> CheckingRunner:
            return CheckingRunner(kv, depth=case.depth, seen=seen, **options)

        monkeypatch.setattr(random_runs, "FakeRunner", make)
        seen.update(random_runs.run(case, stacks.make).counts)
    placeholders = (f"placeholders at depth {depth}" for depth in (2, 3))
    for what in ("pieces", "drafts", "scored", "dead rows", "copy", "out", "rolled back", *placeholders):
        assert seen[what] > 0, seen

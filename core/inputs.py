"""`InputBuilder`: a plan becomes tensors, here and nowhere else.

Lists are flattened once a step with numpy; block tables live in one array that is updated in place, only where they changed.
Symbols: T tokens, B rows (chunks, then dead rows), R rows of logits that tokens are drawn from, P tokens of prompts that are scored.
Must not know: models, kernels, how an allocator works.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.arrays import Ints
from octavo.core.attention import AttentionMetadata
from octavo.core.errors import PluginContractError
from octavo.core.kv import Allocator
from octavo.core.plan import BatchPlan, Chunk
from octavo.core.request import Sequence, Status
from octavo.core.row_requests import num_draws


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """All that a forward pass reads; self-contained and picklable.

    With several steps in flight, a token that one of them samples is not known to the host when the next one is built. It is handed
    on in a ring of `depth * max_rows` ids on the device: a step writes into it the draws `keep_draws` at the places `keep_at`, and
    `input_from[t]` is -1 or the place where token t's id stands.
    """

    input_ids: torch.Tensor  # [T] int64
    input_from: torch.Tensor | None  # [T] int64; None: all known
    positions: torch.Tensor  # [T] int64
    attention: AttentionMetadata
    logit_rows: torch.Tensor  # [R] int64, indices into T: tokens are drawn from their logits
    prompts: PromptRows | None  # None: no prompt is scored
    draws: list[int]  # [chunks] tokens drawn from a chunk's rows of logits; N in all
    keep_draws: torch.Tensor | None  # [K] int64, indices into N; None: one step at a time
    keep_at: torch.Tensor | None  # [K] int64


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptRows:
    """Tokens of prompts whose log probabilities are wanted; nothing is drawn there."""

    rows: torch.Tensor  # [P] int64, indices into T: the tokens before them, whose logits score them
    targets: torch.Tensor  # [P] int64, their ids


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenation of `starts[i] .. starts[i] + counts[i] - 1`."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - counts), counts) + np.arange(total, dtype=np.int64)


class _Flat(NamedTuple):
    """Where the tokens of a step's chunks stand."""

    positions: Ints  # [T] in its sequence
    stops: Ints  # [chunks] one past a chunk's last position
    owners: Ints  # [T] the chunk whose token it is
    query_start: npt.NDArray[np.int32]  # [chunks + 1]
    logit_rows: Ints  # [R]
    prompt_rows: Ints | None  # [P]


def _flatten(starts: Ints, lengths: Ints, drawn: Ints, logits_from: Ints) -> _Flat:
    """Chunks of any lengths, all arguments [chunks]; `drawn`: from how many of its last tokens' logits something is drawn."""
    stops = starts + lengths
    query_start = np.concatenate(([0], np.cumsum(lengths)))
    firsts = query_start[1:] - drawn
    scored = stops - drawn - logits_from
    return _Flat(
        ranges(starts, lengths),
        stops,
        np.repeat(np.arange(len(starts)), lengths),
        query_start.astype(np.int32),
        ranges(firsts, drawn),
        ranges(firsts - scored, scored) if scored.any() else None,
    )


class BlockTables:
    """Block tables of live sequences in one array, one row each, grown as needed."""

    def __init__(self, kv: Allocator) -> None:
        self._kv = kv
        self._array = np.zeros((16, 8), dtype=np.int32)
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(15, -1, -1))

    def rows(self, sequences: tuple[Sequence, ...]) -> Ints:
        """Bring these sequences' tables up to date; returns their rows in `array`."""
        rows: list[int] = []
        table, known = self._kv.table, self._rows
        for sequence in sequences:
            blocks, dirty = table(sequence)
            row = known.get(sequence)
            if row is None:
                row = self._take(sequence)
            if dirty < len(blocks):
                if len(blocks) > self._array.shape[1]:
                    self._grow(columns=len(blocks))
                self._array[row, dirty : len(blocks)] = blocks[dirty:]
            rows.append(row)
        return np.array(rows, dtype=np.int64)

    def array(self, rows: Ints, columns: int) -> npt.NDArray[np.int32]:
        """A copy of the first columns of these rows."""
        return self._array[rows, :columns]

    def _take(self, sequence: Sequence) -> int:
        if not self._free:
            for gone in [s for s in self._rows if s.status is Status.DONE]:
                self._free.append(self._rows.pop(gone))
        if not self._free:
            height = len(self._array)
            self._grow(height=2 * height)
            self._free = list(range(2 * height - 1, height - 1, -1))
        row = self._rows[sequence] = self._free.pop()
        return row

    def _grow(self, *, height: int = 0, columns: int = 0) -> None:
        old = self._array
        wide = max(old.shape[1], 2 * columns)
        self._array = np.zeros((max(len(old), height), wide), dtype=np.int32)
        self._array[: len(old), : old.shape[1]] = old


class InputBuilder:
    """Builds the inputs of each step. The one reader of `Allocator.table`, and the one that looks inside `Chunk.sequence`."""

    def __init__(self, kv: Allocator, *, device: torch.device, max_rows: int, depth: int = 1) -> None:
        self._kv = kv
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._tables = BlockTables(kv) if kv.layout == "block_table" else None
        self._max_rows = max_rows
        self._depth = depth
        self._counted = np.arange(2 * max_rows)  # read, never written, by many steps
        self._counted32 = self._counted.astype(np.int32)
        self._step = 0  # of those that had chunks
        # What recent steps sample, one token a sequence: sequence -> (its epoch, place in the ring).
        self._sampled: deque[dict[Sequence, tuple[int, int]]] = deque(maxlen=depth)

    def forget(self) -> None:
        """Nothing that was sampled by the steps in flight will be asked for."""
        self._sampled.clear()

    def build(self, plan: BatchPlan) -> StepInputs:
        """Flatten the plan's chunks, then its dead rows (one token each, written nowhere).

        Raises PluginContractError if a chunk runs a token that is neither known nor sampled by a step in flight.
        """
        chunks = plan.chunks
        sequences: tuple[Sequence, ...]
        sequences, starts_, lengths_, logits_from_, samples_, drafts_, _ = zip(*chunks, strict=True)
        ids, sources = self._token_ids(chunks)
        starts = np.array(starts_, dtype=np.int64)
        if len(ids) == len(chunks) and all(samples_):
            flat = self._decoding(starts)
        else:
            drawn = np.array(samples_, dtype=np.int64)
            if any(drafts_):
                drawn += [len(drafts) for drafts in drafts_]
            flat = _flatten(starts, np.array(lengths_, dtype=np.int64), drawn, np.array(logits_from_, dtype=np.int64))
        draws = [num_draws(chunk) for chunk in chunks]
        keep_draws, keep_at = self._keep(chunks, draws) if self._depth > 1 else (None, None)
        stops, positions, query_start = flat.stops, flat.positions, flat.query_start
        max_seq_len = int(stops.max())
        region_starts = block_table = None
        if self._tables is None:
            region_starts = np.array([self._kv.region(sequence)[0] for sequence in sequences], dtype=np.int64)
            slots = region_starts[flat.owners] + positions
        else:
            size = self._kv.block_size
            block_table = self._tables.array(self._tables.rows(sequences), -(-max_seq_len // size))
            blocks, offsets = np.divmod(positions, size)
            slots = block_table[flat.owners, blocks] * np.int64(size) + offsets
        if plan.dead_rows:
            dead = plan.dead_rows
            ids += [0] * dead
            positions = np.concatenate((positions, np.zeros(dead, dtype=np.int64)))
            slots = np.concatenate((slots, np.full(dead, -1, dtype=np.int64)))
            stops = np.concatenate((stops, np.zeros(dead, dtype=np.int64)))
            query_start = np.concatenate((query_start, query_start[-1] + 1 + np.arange(dead, dtype=np.int32)))
            if region_starts is not None:
                region_starts = np.concatenate((region_starts, np.zeros(dead, dtype=np.int64)))
            if block_table is not None:
                block_table = np.concatenate((block_table, np.zeros((dead, block_table.shape[1]), dtype=np.int32)))
        attention = AttentionMetadata(
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(stops.astype(np.int32)),
            slots=self._tensor(slots),
            max_query_len=max(lengths_),
            max_seq_len=max_seq_len,
            region_starts=None if region_starts is None else self._tensor(region_starts.astype(np.int32)),
            block_table=None if block_table is None else self._tensor(block_table),
            block_size=self._kv.block_size,
        )
        return StepInputs(
            input_ids=self._tensor(np.array(ids, dtype=np.int64)),
            input_from=None if sources is None else self._tensor(np.pad(sources, (0, plan.dead_rows), constant_values=-1)),
            positions=self._tensor(positions),
            attention=attention,
            logit_rows=self._tensor(flat.logit_rows),
            prompts=None if flat.prompt_rows is None else self._prompts(chunks, flat.prompt_rows),
            draws=draws,
            keep_draws=None if keep_draws is None else self._tensor(keep_draws),
            keep_at=None if keep_at is None else self._tensor(keep_at),
        )

    def _decoding(self, starts: Ints) -> _Flat:
        """One token each, and one drawn after it: nearly all steps. What only counts is not counted again."""
        rows = len(starts)
        if rows >= len(self._counted):
            self._counted = np.arange(2 * rows)
            self._counted32 = self._counted.astype(np.int32)
        each = self._counted[:rows]
        return _Flat(starts, starts + 1, each, self._counted32[: rows + 1], each, None)

    def _prompts(self, chunks: tuple[Chunk, ...], rows: Ints) -> PromptRows:
        """`rows` are those before the tokens that are scored."""
        targets = [t for chunk in chunks for t in chunk.sequence.request.prompt[chunk.logits_from + 1 : chunk.sampled_from + 1]]
        return PromptRows(rows=self._tensor(rows), targets=self._tensor(np.array(targets, dtype=np.int64)))

    def _token_ids(self, chunks: tuple[Chunk, ...]) -> tuple[list[int], Ints | None]:
        """Ids of all tokens of the step; 0 where a step in flight samples it, and then the places in the ring (else -1)."""
        ids: list[int] = []
        pending: list[tuple[int, int]] = []
        for sequence, start, length, _, _, drafts, epoch in chunks:
            output, at = sequence.output, start - sequence.prompt_len
            if length == 1 and 0 <= at < len(output):
                ids.append(output[at])  # a decode step of one that is known: nearly all
                continue
            known = sequence.tokens(start, start + length - len(drafts))
            ids += known
            missing = length - len(drafts) - len(known)
            if missing > 0:
                pending += zip(range(len(ids), len(ids) + missing), self._in_flight(sequence, epoch, missing), strict=True)
                ids += [0] * missing
            ids += drafts
        if not pending:
            return ids, None
        sources = np.full(len(ids), -1, dtype=np.int64)
        for index, place in pending:
            sources[index] = place
        return ids, sources

    def _in_flight(self, sequence: Sequence, epoch: int, count: int) -> list[int]:
        """Places of the last `count` tokens that steps in flight sample for this sequence, oldest first."""
        found = [step[sequence][1] for step in self._sampled if step.get(sequence, (None, 0))[0] == epoch]
        if count > len(found):
            raise PluginContractError(f"{sequence.id!r}: {count} tokens of a chunk are neither known nor sampled by a step in flight")
        return found[-count:]

    def _keep(self, chunks: tuple[Chunk, ...], draws: list[int]) -> tuple[Ints, Ints]:
        """Which draws to keep for the steps to come, and where. Only where one token is sure to come: for others the host waits."""
        ring = self._step % self._depth * self._max_rows
        self._step += 1
        rows = [row for row, chunk in enumerate(chunks) if draws[row] == 1 and not chunk.drafts]
        self._sampled.append({chunks[row].sequence: (chunks[row].epoch, ring + row) for row in rows})
        last_draws = np.cumsum(draws, dtype=np.int64) - 1
        return last_draws[rows], ring + np.array(rows, dtype=np.int64)

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._on_cpu else tensor.to(self._device, non_blocking=True)

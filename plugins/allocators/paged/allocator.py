"""Paged allocation: blocks are taken as positions are about to be written, shared by forks, and copied before a shared one is written.

In the common case, the next position of a running sequence, `reserve` and `commit` look at one block. A prefix cache goes beside this
class, not under it: as the pool's shelf, and by `adopt`. Must not know: schedulers, tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.errors import InvalidOptionsError, PluginContractError
from octavo.core.kv import Allocator, BlockEvent, BlockState, KVStats, KVUsage
from octavo.core.plan import Transfer
from octavo.core.request import Request, Sequence
from octavo.plugins.allocators.block_pool import BlockPool, Shelf
from octavo.plugins.allocators.paged.block_table import BlockTable

if TYPE_CHECKING:
    from typing import Literal

    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Suspended:
    """Host blocks that keep the first `num_tokens` positions of a sequence."""

    blocks: tuple[int, ...]
    num_tokens: int


class PagedAllocator(Allocator):
    """`capacity` and `host_capacity` are rounded down to whole blocks. Raises InvalidOptionsError if the pool holds not even one."""

    layout = "block_table"

    def __init__(
        self,
        *,
        capacity: int,
        block_size: int,
        host_capacity: int = 0,
        shelf: Shelf | None = None,
        on_full: Callable[[Sequence, Seq[int], int], None] | None = None,
        name: str = "paged",
    ) -> None:
        """`shelf` and `on_full` are a prefix cache's: who keeps blocks, and who is told how many of a sequence's blocks are full now."""
        super().__init__()
        self._on_full = on_full
        self._name = name  # whose books these are, for messages
        if capacity < block_size:
            raise InvalidOptionsError(
                f"allocator {name!r}: block_size = {block_size}, but the KV pool has {capacity} slots and must hold one block at least: "
                "enlarge it (num_kv_slots, kv_cache_memory) or take smaller blocks"
            )
        self.block_size = block_size
        self.capacity = capacity // block_size * block_size
        self.host_capacity = host_capacity // block_size * block_size
        self._pool = BlockPool(capacity // block_size, shelf)
        self._host = BlockPool(host_capacity // block_size)
        self._filled = [0] * self._pool.num_blocks  # slots of each block that were written since it was taken
        self._num_filled = 0  # their sum over live blocks
        self._tables: dict[Sequence, BlockTable] = {}
        self._suspended: dict[Sequence, Suspended] = {}
        self._copies = self._moves = 0

    def _blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    # -------------------------------------------------------------- one sequence

    def fits(self, *requests: Request) -> bool:
        """Seats of one request share the full blocks of its prompt, and its last one too if none of them writes."""
        return sum(self._blocks_to_end(request) for request in requests) <= self._pool.num_blocks

    def _blocks_to_end(self, request: Request) -> int:
        length, end = len(request.prompt), self._blocks_for(request.sequences[0].max_positions)
        if request.sequences[0].max_positions == length:
            return end
        shared = length // self.block_size
        return shared + request.seats * (end - shared)

    def open(self, sequence: Sequence) -> int:
        """Nothing is cached: 0."""
        if sequence in self._tables or sequence in self._suspended:
            raise PluginContractError(f"{self._name}: sequence {sequence.id!r} was opened twice")
        self._tables[sequence] = BlockTable()
        return 0

    def adopt(self, sequence: Sequence, blocks: Seq[int], num_tokens: int) -> None:
        """Open a sequence on blocks that hold its first `num_tokens` positions already, sharing them."""
        self.open(sequence)
        for block in blocks:
            self._pool.share(block)
        table = self._tables[sequence]
        table.blocks += blocks
        self._mark_filled(table, num_tokens)
        self._tell("taken", sequence, blocks)

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        """All blocks that positions start .. stop - 1 need, or none."""
        table = self._tables.get(sequence)
        if table is None:
            raise self._not_open(sequence, "reserve")
        blocks, pool, size = table.blocks, self._pool, self.block_size
        first, last, held = start // size, -(-stop // size), len(table.blocks)
        if last <= held and last == first + 1 and pool.refs[blocks[first]] == 1 and self._filled[blocks[first]] < size:
            return True
        if start >= stop:
            return True
        written = range(first, min(last, held))
        shared = [i for i in written if pool.refs[blocks[i]] > 1]
        new = max(0, last - held)
        if len(shared) + new > pool.available:
            return False
        for i in written:
            if pool.refs[blocks[i]] == 1 and self._filled[blocks[i]] == size:
                pool.overwrite(blocks[i])
        for i in shared:
            self._copy_block(sequence, table, i)
        if new:
            taken = pool.take(new)
            blocks += taken
            self._tell("taken", sequence, taken)
        return True

    def _copy_block(self, sequence: Sequence, table: BlockTable, index: int) -> None:
        """Give the sequence a copy of a shared block, to write into."""
        old = table.blocks[index]
        (new,) = self._pool.take(1)
        self._move("copy", old, new)
        self._copies += 1
        self._fill(new, min(self.block_size, max(0, table.num_filled - index * self.block_size)))
        self._release(sequence, [old])
        table.replace(index, new)
        self._tell("taken", sequence, [new])

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Only the blocks between the last commit and this one are looked at."""
        table = self._tables.get(sequence)
        if table is None:
            raise self._not_open(sequence, "commit")
        if num_tokens <= table.num_filled:
            return
        size, blocks = self.block_size, table.blocks
        first = table.num_filled // size
        slots = num_tokens - first * size
        if slots <= size and first < len(blocks):
            self._fill(blocks[first], slots)
            table.num_filled = num_tokens
        else:
            self._mark_filled(table, num_tokens)
        if slots >= size and self._on_full is not None:
            self._on_full(sequence, blocks, num_tokens // size)

    def _mark_filled(self, table: BlockTable, num_tokens: int) -> None:
        size, blocks = self.block_size, table.blocks
        if num_tokens > len(blocks) * size:
            raise PluginContractError(
                f"{self._name}: {num_tokens} positions were committed, the sequence holds {len(blocks)} blocks of {size}"
            )
        for i in range(table.num_filled // size, -(-num_tokens // size)):
            self._fill(blocks[i], min(size, num_tokens - i * size))
        table.num_filled = num_tokens

    def _fill(self, block: int, slots: int) -> None:
        more = slots - self._filled[block]
        if more > 0:
            self._filled[block] = slots
            self._num_filled += more

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Share the blocks of the first `num_tokens` positions, which must be committed."""
        table = self._tables.get(parent)
        if table is None:
            raise self._not_open(parent, "fork")
        if num_tokens > table.num_filled:
            raise PluginContractError(f"{self._name}: {parent.id!r} was to share {num_tokens} positions, {table.num_filled} are committed")
        self.adopt(child, table.blocks[: self._blocks_for(num_tokens)], num_tokens)

    def close(self, sequence: Sequence) -> None:
        """The last block goes first, so that a stack hands them out in order again and a cache gives up tails before heads."""
        kept = self._suspended.pop(sequence, None)
        if kept is not None:
            for block in kept.blocks:
                self._host.release(block)
            return
        table = self._tables.pop(sequence, None)
        if table is None:
            raise self._not_open(sequence, "close")
        self._release(sequence, table.blocks[::-1])

    def _release(self, sequence: Sequence, blocks: Seq[int]) -> None:
        self._tell("released", sequence, blocks)
        for block in blocks:
            if self._pool.release(block):
                self._num_filled -= self._filled[block]
                self._filled[block] = 0

    # --------------------------------------------------------------- host memory

    def suspend(self, sequences: list[Sequence]) -> bool:
        """Each block that holds a computed position is copied out once, however many of these share it."""
        blocks: dict[Sequence, list[int]] = {}
        for sequence in sequences:
            table, count = self._tables.get(sequence), sequence.num_computed
            if table is None:
                raise self._not_open(sequence, "suspend")
            if count > table.num_filled:
                raise PluginContractError(f"{self._name}: {count} positions of {sequence.id!r} are computed, {table.num_filled} committed")
            blocks[sequence] = table.blocks[: self._blocks_for(count)]
        distinct = list(dict.fromkeys(block for row in blocks.values() for block in row))
        if len(distinct) > self._host.available:
            return False
        places = dict(zip(distinct, self._host.take(len(distinct)), strict=True))
        for block, place in places.items():
            self._move("out", block, place)
        for sequence, row in blocks.items():
            self.close(sequence)
            self._suspended[sequence] = Suspended(tuple(places[block] for block in row), sequence.num_computed)
            for block in row:
                self._host.share(places[block])
        for place in places.values():
            self._host.release(place)  # the reference it was taken with: each sequence has its own now
        return True

    def resume(self, sequences: list[Sequence]) -> list[int] | None:
        """Each host block is copied in once."""
        kept: dict[Sequence, Suspended] = {}
        for sequence in sequences:
            if sequence not in self._suspended:
                raise PluginContractError(f"{self._name}: resume of sequence {sequence.id!r}, which is not suspended")
            kept[sequence] = self._suspended[sequence]
        if self._blocks_to_resume(kept) > self._pool.available:
            return None
        distinct = list(dict.fromkeys(place for entry in kept.values() for place in entry.blocks))
        blocks = dict(zip(distinct, self._pool.take(len(distinct)), strict=True))
        for place, block in blocks.items():
            self._move("in", place, block)
        for sequence, entry in kept.items():
            self.close(sequence)
            self.adopt(sequence, [blocks[place] for place in entry.blocks], entry.num_tokens)
        for block in blocks.values():
            self._pool.release(block)
        for sequence, entry in kept.items():
            if not self.reserve(sequence, entry.num_tokens, sequence.num_tokens):
                raise PluginContractError(f"{self._name}: {sequence.id!r} was resumed into blocks that were counted wrong")
        return [entry.num_tokens for entry in kept.values()]

    def _blocks_to_resume(self, kept: dict[Sequence, Suspended]) -> int:
        """What comes back, what each sequence adds up to `num_tokens`, and copies of a shared last block for all but its last writer."""
        sharers = Counter(place for entry in kept.values() for place in entry.blocks)
        need = len(sharers)
        for sequence, entry in kept.items():
            need += max(0, self._blocks_for(sequence.num_tokens) - len(entry.blocks))
            if entry.num_tokens % self.block_size and entry.num_tokens < sequence.num_tokens and sharers[entry.blocks[-1]] > 1:
                sharers[entry.blocks[-1]] -= 1
                need += 1
        return need

    # -------------------------------------------------------------------- books

    def table(self, sequence: Sequence) -> tuple[npt.NDArray[np.int32], int]:
        """A view of the block table and the first entry that changed since the last call."""
        table = self._tables.get(sequence)
        if table is None:
            raise self._not_open(sequence, "table")
        return table.read()

    def blocks(self, sequence: Sequence) -> Seq[int]:
        """The blocks of an open sequence in the order of its positions; not to be kept or changed."""
        table = self._tables.get(sequence)
        if table is None:
            raise self._not_open(sequence, "blocks")
        return table.blocks

    def committed(self, sequence: Sequence) -> int:
        """Positions of an open sequence whose KV is written."""
        table = self._tables.get(sequence)
        if table is None:
            raise self._not_open(sequence, "committed")
        return table.num_filled

    def snapshot(self) -> list[BlockState]:
        """Blocks that somebody holds."""
        size, owners = self.block_size, dict[int, list[str]]()
        for sequence, table in self._tables.items():
            for block in table.blocks:
                owners.setdefault(block, []).append(sequence.id)
        return [BlockState(block * size, size, tuple(owners[block])) for block in sorted(owners)]

    def reset(self) -> None:
        """Only a shelf keeps anything."""
        self._pool.empty_shelf()

    def stats(self) -> KVStats:
        """Copies are of blocks."""
        return KVStats(copies=self._copies, transfers=self._moves)

    def usage(self) -> KVUsage:
        """O(1), from running counts."""
        pool, size = self._pool, self.block_size
        return KVUsage(
            filled=self._num_filled,
            held=pool.live * size - self._num_filled,
            external=0,
            cached=pool.shelved * size,
            free=pool.free * size,
            host=self._host.live * size,
            saved=pool.saved * size,
        )

    def _move(self, kind: Literal["copy", "out", "in"], source: int, target: int) -> None:
        size = self.block_size
        self._transfers.append(Transfer(kind, source * size, target * size, size))
        self._moves += 1

    def _tell(self, kind: Literal["taken", "released"], sequence: Sequence, blocks: Seq[int]) -> None:
        if self.observed:
            size, filled = self.block_size, self._filled
            self._events += [
                BlockEvent(kind, block * size, size, sequence.id, filled=filled[block] if kind == "released" else 0) for block in blocks
            ]

    def tell_content(self, kind: Literal["cached", "evicted"], block: int, key: str) -> None:
        """An event about what a block holds, from whoever keeps blocks by content."""
        if self.observed:
            self._events.append(BlockEvent(kind, block * self.block_size, self.block_size, key=key))

    def _not_open(self, sequence: Sequence, what: str) -> PluginContractError:
        where = "suspended" if sequence in self._suspended else "never opened, or closed already"
        return PluginContractError(f"{self._name}: {what} of sequence {sequence.id!r}, which is {where}")

    def check(self) -> None:
        """Count references, free blocks and filled slots from scratch and compare."""
        self._pool.check(Counter(block for table in self._tables.values() for block in table.blocks))
        self._host.check(Counter(place for entry in self._suspended.values() for place in entry.blocks))
        size = self.block_size
        written = [0] * self._pool.num_blocks
        for sequence, table in self._tables.items():
            if len(set(table.blocks)) < len(table.blocks):
                raise PluginContractError(f"{self._name}: {sequence.id!r} has a block twice: {table.blocks}")
            if table.array[: table.dirty_from].tolist() != table.blocks[: table.dirty_from]:
                raise PluginContractError(
                    f"{self._name}: {sequence.id!r}: the array says {table.array[: table.dirty_from]}, not {table.blocks}"
                )
            for i, block in enumerate(table.blocks):
                written[block] = max(written[block], min(size, table.num_filled - i * size))
        for block, slots in enumerate(self._filled):
            # A sharer that has gone may have written further than those that are left.
            if not written[block] <= slots <= (size if self._pool.refs[block] else 0):
                raise PluginContractError(
                    f"{self._name}: block {block} counts {slots} filled slots, its holders committed {written[block]}"
                )
        if sum(self._filled) != self._num_filled:
            raise PluginContractError(f"{self._name}: {self._num_filled} slots are counted as filled, the blocks hold {sum(self._filled)}")

"""Allocators that break one promise each."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.kv import Allocator, KVUsage
from octavo.core.plan import Transfer
from octavo.core.request import Request, Sequence
from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.paged.block_table import BlockTable

# ----------------------------------------------------------------------- both layouts


class Reversed(Allocator):
    def drain_transfers(self) -> list[Transfer]:
        return super().drain_transfers()[::-1]


class Grouped(Allocator):
    """As a runner that does all outs, then all ins, then all copies."""

    def drain_transfers(self) -> list[Transfer]:
        return sorted(super().drain_transfers(), key=lambda transfer: ("out", "in", "copy").index(transfer.kind))


class Unordered(Allocator):
    """A failed step's transfers come after those planned meanwhile."""

    def requeue(self, transfers: tuple[Transfer, ...]) -> None:
        self._transfers += transfers


class Forgetful(Allocator):
    """A failed step's transfers are lost."""

    def requeue(self, transfers: tuple[Transfer, ...]) -> None:
        pass


class PagedReversed(Reversed, PagedAllocator): ...


class PagedGrouped(Grouped, PagedAllocator): ...


class PagedUnordered(Unordered, PagedAllocator): ...


class PagedForgetful(Forgetful, PagedAllocator): ...


class ContiguousReversed(Reversed, ContiguousAllocator): ...


class ContiguousGrouped(Grouped, ContiguousAllocator): ...


class ContiguousUnordered(Unordered, ContiguousAllocator): ...


# ------------------------------------------------------------------------------ paged


class WritesShared(PagedAllocator):
    def _copy_block(self, sequence: Sequence, table: BlockTable, index: int) -> None:
        pass


class CopiesByCount(PagedAllocator):
    """Fault 49: asks for the number of positions, not for which of them are to be written."""

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        if stop <= len(self._tables[sequence].blocks) * self.block_size:
            return True
        return super().reserve(sequence, start, stop)


class CopiesWithoutData(PagedAllocator):
    def _move(self, kind, source, target):  # type: ignore[no-untyped-def]
        if kind != "copy":
            super()._move(kind, source, target)


class CopiesAlways(PagedAllocator):
    """The last owner copies too, instead of writing in place."""

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        table = self._tables[sequence]
        index = start // self.block_size
        if start % self.block_size and index < len(table.blocks) and self._pool.available:
            self._copy_block(sequence, table, index)
        return super().reserve(sequence, start, stop)


class SharesWholeTable(PagedAllocator):
    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self.adopt(child, self._tables[parent].blocks, num_tokens)


class SharesUncounted(PagedAllocator):
    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self.open(child)
        self._tables[child].blocks += self._tables[parent].blocks[: self._blocks_for(num_tokens)]
        self._tables[child].num_filled = num_tokens


class TakesWhatThereIs(PagedAllocator):
    """A refusal keeps the blocks that it found."""

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        granted = super().reserve(sequence, start, stop)
        if not granted:
            self._tables[sequence].blocks += self._pool.take(self._pool.available)
        return granted


class ForgetsGrant(PagedAllocator):
    """Fault 15: asked again, it takes blocks again."""

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        granted = super().reserve(sequence, start, stop)
        if granted and self._pool.available:
            self._tables[sequence].blocks += self._pool.take(1)
        return granted


class LeaksTail(PagedAllocator):
    def close(self, sequence: Sequence) -> None:
        if sequence in self._tables and len(self._tables[sequence].blocks) > 1:
            self._tables[sequence].blocks.pop()
        super().close(sequence)


class HeadFirst(PagedAllocator):
    def close(self, sequence: Sequence) -> None:
        if sequence in self._tables:
            self._tables[sequence].blocks.reverse()
        super().close(sequence)


class CountsSharedTwice(PagedAllocator):
    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        super().fork(parent, child, num_tokens)
        self._num_filled += num_tokens


class CountsSavedBlocks(PagedAllocator):
    """Blocks instead of slots."""

    def usage(self) -> KVUsage:
        usage = super().usage()
        return replace(usage, saved=usage.saved // self.block_size)


class ForgetsWhoLeft(PagedAllocator):
    """A sharer that goes still saves."""

    def close(self, sequence: Sequence) -> None:
        before = self._pool.saved
        super().close(sequence)
        self._pool._num_refs += before - self._pool.saved


class TableUnchanged(PagedAllocator):
    def table(self, sequence):  # type: ignore[no-untyped-def]
        row, _ = super().table(sequence)
        return row, len(row)


class TableHidesCopies(PagedAllocator):
    """An entry replaced by a copy isn't said to have changed."""

    def _copy_block(self, sequence: Sequence, table: BlockTable, index: int) -> None:
        before = table.dirty_from
        super()._copy_block(sequence, table, index)
        table.dirty_from = before


class ResumesOneByOne(PagedAllocator):
    """Sharing is lost, and a group that fitted shared doesn't fit apart (fault 50)."""

    def resume(self, sequences: list[Sequence]) -> list[int] | None:
        counts: list[int] = []
        for sequence in sequences:
            count = super().resume([sequence])
            if count is None:
                return None
            counts += count
        return counts


class ResumesTooCarefully(PagedAllocator):
    """Wants a copy of the shared last block for its last writer too."""

    def _blocks_to_resume(self, kept):  # type: ignore[no-untyped-def]
        partial = any(entry.num_tokens % self.block_size for entry in kept.values())
        return super()._blocks_to_resume(kept) + (len(kept) > 1 and partial)


class ResumesTooBoldly(PagedAllocator):
    """Forgets that sharers of a block about to be written need copies."""

    def _blocks_to_resume(self, kept):  # type: ignore[no-untyped-def]
        return len({place for entry in kept.values() for place in entry.blocks})


class DropsHostCopy(PagedAllocator):
    """Fault 51: a refused resume loses what was kept."""

    def resume(self, sequences: list[Sequence]) -> list[int] | None:
        counts = super().resume(sequences)
        if counts is None:
            self.close(sequences[0])
            self.open(sequences[0])
        return counts


class ForgetsToBringBack(PagedAllocator):
    def _move(self, kind, source, target):  # type: ignore[no-untyped-def]
        if kind != "in":
            super()._move(kind, source, target)


class SuspendsSome(PagedAllocator):
    """Keeps those for which the host has room."""

    def suspend(self, sequences: list[Sequence]) -> bool:
        return super().suspend(sequences) or not all(PagedAllocator.suspend(self, [s]) for s in sequences)


class SuspendsTwice(PagedAllocator):
    """A block shared within the group is kept once a sequence."""

    def suspend(self, sequences: list[Sequence]) -> bool:
        return all(PagedAllocator.suspend(self, [s]) for s in sequences)


class LeaksHost(PagedAllocator):
    def close(self, sequence: Sequence) -> None:
        if sequence in self._suspended:
            del self._suspended[sequence]
        else:
            super().close(sequence)


class FitsOneSeat(PagedAllocator):
    def _blocks_to_end(self, request: Request) -> int:
        return self._blocks_for(request.sequences[0].max_positions)


class FreesTwice(PagedAllocator):
    """A double free passes unseen."""

    def close(self, sequence: Sequence) -> None:
        if sequence in self._tables or sequence in self._suspended:
            super().close(sequence)


class EventsForgetForks(PagedAllocator):
    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        observed, self.observed = self.observed, False
        super().fork(parent, child, num_tokens)
        self.observed = observed


# ------------------------------------------------------------------------- contiguous


class OneSeatOnly(ContiguousAllocator):
    """The first reserve takes no regions for the forks to come."""

    def _without_region(self, request: Request) -> int:
        return 1


class ForksWithoutData(ContiguousAllocator):
    def _move(self, kind, source, target, count):  # type: ignore[no-untyped-def]
        if kind != "copy":
            super()._move(kind, source, target, count)


class ForksTooShort(ContiguousAllocator):
    def _move(self, kind, source, target, count):  # type: ignore[no-untyped-def]
        super()._move(kind, source, target, max(1, count - 1))


class GivesBeamsAway(ContiguousAllocator):
    def close(self, sequence: Sequence) -> None:
        width, sequence.request.beam_width = sequence.request.beam_width, 0
        super().close(sequence)
        sequence.request.beam_width = width


class OneSlotShort(ContiguousAllocator):
    def want(self, sequence: Sequence) -> int:
        return max(1, super().want(sequence) - 1)


class OneSlotMore(ContiguousAllocator):
    """The KV of the last token is given a slot."""

    def want(self, sequence: Sequence) -> int:
        return super().want(sequence) + 1


class GrantsHalf(ContiguousAllocator):
    """Regions taken before one was refused are not given back."""

    def _give(self, starts: list[int], length: int) -> None:
        pass


class RemembersRefusal(ContiguousAllocator):
    """External waste is never forgotten."""

    def _take(self, length: int, count: int) -> list[int] | None:
        refused = self._refused
        starts = super()._take(length, count)
        self._refused = self._refused or refused
        return starts


class LeaksHostRun(ContiguousAllocator):
    def _give_host(self, start: int, count: int) -> None:
        pass

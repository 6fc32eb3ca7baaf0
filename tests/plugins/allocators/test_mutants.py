"""Break one promise of an allocator at a time: a test must notice, or the promise is untested.

`MUTANTS` is the table that the documentation shows: what is broken, and who sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from octavo.core.kv import Allocator
from octavo.core.plan import Transfer
from octavo.core.request import Request, Sequence
from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
from octavo.plugins.allocators.first_fit import FirstFit
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.paged.block_table import BlockTable
from tests.plugins.allocators.machine import AllocatorMachine
from tests.plugins.allocators.memory import MAX_MODEL_LEN

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

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        self._seats[sequence].family.started = True
        return super().reserve(sequence, start, stop)


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


@dataclass(frozen=True)
class Mutant:
    """`noticed_by`: the state machine, or a test by module and name, called with `arguments`."""

    broken: type[Allocator]
    noticed_by: str = "state machine"
    arguments: tuple[object, ...] = ()


IN_ORDER = "test_promises.test_transfers_of_one_step_are_meant_in_their_order"
COME_FIRST = "test_promises.test_a_failed_steps_transfers_come_first"
MUTANTS: dict[str, Mutant] = {
    "paged: transfers come in reverse order": Mutant(PagedReversed, IN_ORDER),
    "paged: transfers come grouped by kind": Mutant(PagedGrouped, IN_ORDER),
    "paged: a failed step's transfers come last": Mutant(PagedUnordered, COME_FIRST),
    "paged: a failed step's transfers are lost": Mutant(PagedForgetful),
    "paged: a shared block is written without a copy": Mutant(WritesShared),
    "paged: copies by the number of positions": Mutant(CopiesByCount),
    "paged: a copy has no transfer": Mutant(CopiesWithoutData),
    "paged: the last owner copies too": Mutant(
        CopiesAlways, "test_paged.test_only_the_shared_block_about_to_be_written_is_copied_and_the_last_owner_writes_in_place"
    ),
    "paged: a fork shares room that its parent has not filled": Mutant(
        SharesWholeTable, "test_paged.test_a_fork_takes_no_block_beyond_what_it_shares"
    ),
    "paged: a fork isn't counted": Mutant(SharesUncounted),
    "paged: a refusal takes what there is": Mutant(TakesWhatThereIs),
    "paged: a grant is forgotten": Mutant(ForgetsGrant, "test_paged.test_a_grant_outlives_the_step_it_was_for"),
    "paged: close forgets the last block": Mutant(LeaksTail),
    "paged: heads go before tails": Mutant(HeadFirst, "test_paged.test_blocks_come_back_tail_first_and_go_out_in_order"),
    "paged: a shared slot counts twice": Mutant(CountsSharedTwice),
    "paged: the table says nothing changed": Mutant(TableUnchanged),
    "paged: the table does not tell of a copy": Mutant(TableHidesCopies),
    "paged: a group is resumed one by one": Mutant(
        ResumesOneByOne, "test_paged.test_a_group_is_suspended_once_a_block_and_comes_back_shared_as_it_was"
    ),
    "paged: resume asks for a block too many": Mutant(
        ResumesTooCarefully, "test_paged.test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal", (5,)
    ),
    "paged: resume asks for too few blocks": Mutant(
        ResumesTooBoldly, "test_paged.test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal", (4,)
    ),
    "paged: a refused resume loses the host copy": Mutant(
        DropsHostCopy, "test_paged.test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal", (4,)
    ),
    "paged: what was suspended isn't copied in": Mutant(ForgetsToBringBack),
    "paged: suspend keeps a part": Mutant(SuspendsSome, "test_paged.test_suspend_is_all_or_nothing", (2,)),
    "paged: suspend keeps a shared block twice": Mutant(
        SuspendsTwice, "test_paged.test_a_group_is_suspended_once_a_block_and_comes_back_shared_as_it_was"
    ),
    "paged: host blocks leak": Mutant(LeaksHost),
    "paged: fits counts one seat": Mutant(FitsOneSeat, "test_paged.test_fits_counts_what_seats_share_and_is_exact", (4, 44)),
    "paged: a double free is ignored": Mutant(FreesTwice, "test_promises.test_closing_twice_raises"),
    "paged: events leave forks out": Mutant(EventsForgetForks),
    "contiguous: transfers come in reverse order": Mutant(ContiguousReversed, IN_ORDER),
    "contiguous: transfers come grouped by kind": Mutant(ContiguousGrouped, IN_ORDER),
    "contiguous: a failed step's transfers come last": Mutant(ContiguousUnordered, COME_FIRST),
    "contiguous: no room is granted for forks": Mutant(OneSeatOnly),
    "contiguous: a fork has no transfer": Mutant(ForksWithoutData),
    "contiguous: a transfer is a slot short": Mutant(ForksTooShort),
    "contiguous: a dropped beam's region is given away": Mutant(GivesBeamsAway),
    "contiguous: regions are a slot short": Mutant(OneSlotShort),
    "contiguous: regions are a slot too long": Mutant(
        OneSlotMore, "test_contiguous.test_request_takes_the_prompt_and_29_slots_for_30_outputs"
    ),
    "contiguous: a refusal keeps some regions": Mutant(GrantsHalf),
    "contiguous: external waste is never forgotten": Mutant(
        RemembersRefusal, "test_contiguous.test_external_waste_is_free_runs_shorter_than_the_last_refusal_until_the_next_success"
    ),
    "contiguous: host slots leak": Mutant(LeaksHostRun),
}


def build(broken: type[Allocator]) -> Allocator:
    if issubclass(broken, PagedAllocator):
        return broken(capacity=44, block_size=4, host_capacity=28)
    assert issubclass(broken, ContiguousAllocator)
    return broken(FirstFit(66), reservation="request", max_model_len=MAX_MODEL_LEN, host_capacity=28)


def drive(allocator: type[Allocator]) -> None:
    """The same runs each time."""
    machine = type("Machine", (AllocatorMachine,), {"build": staticmethod(lambda: build(allocator))})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def sound(mutant: Mutant) -> type[Allocator]:
    return PagedAllocator if issubclass(mutant.broken, PagedAllocator) else ContiguousAllocator


def find(name: str) -> Callable[..., None]:
    module, test = name.split(".")
    return getattr(import_module(f"tests.plugins.allocators.{module}"), test)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes with the allocator as it is fails with the mutant in its place."""
    mutant = MUTANTS[name]
    with pytest.raises((Exception, pytest.fail.Exception)):
        if mutant.noticed_by == "state machine":
            drive(mutant.broken)
        elif mutant.noticed_by.startswith("test_promises"):
            find(mutant.noticed_by)(build(mutant.broken))
        else:
            monkeypatch.setitem(find(mutant.noticed_by).__globals__, sound(mutant).__name__, mutant.broken)
            find(mutant.noticed_by)(*mutant.arguments)


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.noticed_by != "state machine"])
def test_a_test_that_notices_passes_without_the_mutant(name: str) -> None:
    """So that it fails for the promise and not for how it is called here."""
    mutant = MUTANTS[name]
    in_promises = mutant.noticed_by.startswith("test_promises")
    find(mutant.noticed_by)(*([build(sound(mutant))] if in_promises else mutant.arguments))


@pytest.mark.slow
@pytest.mark.parametrize("allocator", [PagedAllocator, ContiguousAllocator])
def test_the_runs_that_notice_pass_without_a_mutant(allocator: type[Allocator]) -> None:
    drive(allocator)

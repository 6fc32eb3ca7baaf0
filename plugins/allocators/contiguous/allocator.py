"""Contiguous allocation: a sequence's KV lies in one region, reserved in full before it starts and never moved.

A request's first reserve takes regions for all its seats, so that its forks have a place to be copied to: a fork must not fail.
Must not know: schedulers, tensors, blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo.core.errors import InvalidOptionsError, PluginContractError, RequestError
from octavo.core.kv import Allocator, BlockEvent, BlockState, KVStats, KVUsage
from octavo.core.plan import Transfer
from octavo.core.request import Request, Sequence
from octavo.plugins.allocators.buddy import next_power_of_two
from octavo.plugins.allocators.first_fit import FirstFit

if TYPE_CHECKING:
    from typing import Literal


class Space(Protocol):
    """Places regions in a row of `capacity` slots; `rounding` of them are held beyond the regions' lengths."""

    capacity: int
    free: int
    rounding: int

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Free runs as (start, length)."""

    def size(self, length: int) -> int:
        """Slots that a region of this length takes."""

    def fits(self, lengths: Iterable[int]) -> bool:
        """An empty pool has room for regions of all these lengths at once."""

    def take(self, length: int) -> int | None:
        """The start of a region, or None."""

    def give(self, start: int, length: int) -> None:
        """Take a region back."""

    def check(self, regions: Iterable[tuple[int, int]]) -> None:
        """Raise PluginContractError unless these are the regions taken."""


@dataclass(slots=True)
class Family:
    """The open sequences of one request, and the starts of its regions that none of them has: not yet, or not any more."""

    length: int  # of each region
    num_open: int = 0
    spare: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Seat:
    """An open sequence. It has no region, and length 0, before its first reserve."""

    family: Family
    start: int = 0
    length: int = 0
    num_filled: int = 0  # positions committed


class ContiguousAllocator(Allocator):
    """Raises InvalidOptionsError if the pool has no room for even one region."""

    layout = "region"

    def __init__(self, space: Space, *, reservation: str, max_model_len: int, host_capacity: int = 0) -> None:
        super().__init__()
        shortest = space.size(max_model_len if reservation == "max" else 1)
        if space.capacity < shortest:
            raise InvalidOptionsError(
                f"allocator 'contiguous': with reservation = {reservation!r} and max_model_len = {max_model_len} a sequence takes at least "
                f"{shortest} slots, but the KV pool has {space.capacity}: enlarge it (num_kv_slots, kv_cache_memory) or lower max_model_len"
            )
        self.capacity = space.capacity
        self.host_capacity = host_capacity
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._space = space
        self._host = FirstFit(host_capacity)
        self._seats: dict[Sequence, Seat] = {}
        self._families: dict[Request, Family] = {}
        self._suspended: dict[Sequence, tuple[int, int]] = {}  # start in host memory, positions
        self._num_filled = 0
        self._refused = 0  # length of the region that was refused last, 0 after a success
        self._copies = self._moves = 0

    def want(self, sequence: Sequence) -> int:
        """Slots of a sequence's region: the whole context, or the positions that its request may write or is known to write."""
        known = sequence.known_output_len or 0
        match self._reservation:
            case "request":
                return sequence.max_positions
            case "oracle":
                return sequence.prompt_len + known - 1
            case "pow2":
                return min(sequence.prompt_len + next_power_of_two(known), self._max_model_len)
            case _:
                return self._max_model_len

    # -------------------------------------------------------------- one sequence

    def check_request(self, request: Request) -> None:
        """`pow2` and `oracle` know how long outputs become, and must not be wrong: a region never grows."""
        if self._reservation not in ("pow2", "oracle"):
            return
        known, lead = request.params.known_output_len, request.sequences[0]
        if known is None:
            raise RequestError(
                f"allocator 'contiguous' with reservation = {self._reservation!r} must know how long the output becomes: set "
                "known_output_len (and ignore_eos), or take reservation = 'request' or 'max'",
                field="known_output_len",
            )
        if self.want(lead) < lead.max_positions:
            raise RequestError(
                f"known_output_len is {known}, but max_tokens {request.max_tokens} lets the output outgrow its region: with "
                f"reservation = {self._reservation!r} ask for max_tokens = known_output_len",
                field="known_output_len",
            )

    def fits(self, *requests: Request) -> bool:
        """Every seat has a region of its own."""
        return self._space.fits(self.want(request.sequences[0]) for request in requests for _ in range(request.seats))

    def open(self, sequence: Sequence) -> int:
        """Nothing is cached: 0."""
        self._open(sequence)
        return 0

    def _open(self, sequence: Sequence) -> Seat:
        if sequence in self._seats or sequence in self._suspended:
            raise PluginContractError(f"contiguous: sequence {sequence.id!r} was opened twice")
        family = self._families.get(sequence.request)
        if family is None:
            family = self._families[sequence.request] = Family(self.want(sequence))
        family.num_open += 1
        seat = self._seats[sequence] = Seat(family)
        return seat

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        """The first call takes the region, and one for each other seat; later ones find it there."""
        seat = self._seats.get(sequence)
        if seat is None:
            raise self._not_open(sequence, "reserve")
        family = seat.family
        if stop > family.length:
            raise PluginContractError(
                f"contiguous: positions {start}..{stop - 1} of {sequence.id!r} were asked for, but its region has {family.length} slots"
            )
        if seat.length:
            return True
        if not family.spare:
            starts = self._take(family.length, max(1, self._without_region(sequence.request)))
            if starts is None:
                return False
            self._add_spare(sequence.request, starts)
        self._sit(sequence, seat)
        return True

    def _without_region(self, request: Request) -> int:
        """Seats that have no region. A policy may keep ended sequences, which have one and need no seat."""
        seated = sum(s in self._seats and self._seats[s].length > 0 for s in request.sequences)
        return request.seats - seated

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts what is filled."""
        seat = self._seats.get(sequence)
        if seat is None:
            raise self._not_open(sequence, "commit")
        if num_tokens > seat.length:
            raise PluginContractError(
                f"contiguous: {num_tokens} positions of {sequence.id!r} were committed, but its region has {seat.length} slots"
            )
        if num_tokens > seat.num_filled:
            self._num_filled += num_tokens - seat.num_filled
            seat.num_filled = num_tokens

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions, which must be committed, into a region granted before."""
        source = self._seats.get(parent)
        if source is None:
            raise self._not_open(parent, "fork")
        if num_tokens > source.num_filled:
            raise PluginContractError(f"contiguous: {parent.id!r} was to share {num_tokens} positions, {source.num_filled} are committed")
        if not source.family.spare:
            raise PluginContractError(f"contiguous: {parent.id!r} was forked more often than its request has seats")
        seat = self._open(child)
        self._sit(child, seat)
        if num_tokens:
            self._move("copy", source.start, seat.start, num_tokens)
            self._copies += 1
        self.commit(child, num_tokens)

    def close(self, sequence: Sequence) -> None:
        """A beam's region stays with its request, whose next beam needs it; the last sequence gives back all."""
        kept = self._suspended.pop(sequence, None)
        if kept is not None:
            self._give_host(*kept)
            return
        seat = self._seats.pop(sequence, None)
        if seat is None:
            raise self._not_open(sequence, "close")
        family, request = seat.family, sequence.request
        self._num_filled -= seat.num_filled
        family.num_open -= 1
        if seat.length:
            self._tell("released", seat.start, seat.length, sequence.id, filled=seat.num_filled)
            if request.beam_width and family.num_open:
                self._add_spare(request, [seat.start])
            else:
                self._space.give(seat.start, seat.length)
        if not family.num_open:
            for start in family.spare:
                self._tell("released", start, family.length, request.id)
                self._space.give(start, family.length)
            del self._families[request]

    # ------------------------------------------------------------------- regions

    def _take(self, length: int, count: int) -> list[int] | None:
        """Starts of `count` regions, or None and nothing has changed."""
        starts: list[int] = []
        for _ in range(count):
            start = self._space.take(length)
            if start is None:
                self._refused = length
                self._give(starts, length)
                return None
            starts.append(start)
        self._refused = 0
        return starts

    def _give(self, starts: list[int], length: int) -> None:
        for start in starts:
            self._space.give(start, length)

    def _add_spare(self, request: Request, starts: list[int]) -> None:
        """The request holds these regions until one of its sequences sits down in them."""
        family = self._families[request]
        family.spare += reversed(starts)
        for start in starts:
            self._tell("taken", start, family.length, request.id)

    def _sit(self, sequence: Sequence, seat: Seat) -> None:
        seat.start = seat.family.spare.pop()
        seat.length = seat.family.length
        self._tell("released", seat.start, seat.length, sequence.request.id)
        self._tell("taken", seat.start, seat.length, sequence.id)

    # --------------------------------------------------------------- host memory

    def suspend(self, sequences: list[Sequence]) -> bool:
        """Only computed positions are kept, each sequence's in a run of host slots."""
        for sequence in sequences:
            seat = self._seats.get(sequence)
            if seat is None:
                raise self._not_open(sequence, "suspend")
            if sequence.num_computed > seat.num_filled:
                raise PluginContractError(
                    f"contiguous: {sequence.num_computed} positions of {sequence.id!r} are computed, {seat.num_filled} committed"
                )
        places: list[tuple[int, int]] = []
        for sequence in sequences:
            start = self._host.take(sequence.num_computed) if sequence.num_computed else 0
            if start is None:
                for place in places:
                    self._give_host(*place)
                return False
            places.append((start, sequence.num_computed))
        for sequence, place in zip(sequences, places, strict=True):
            if place[1]:
                self._move("out", self._seats[sequence].start, *place)
            self.close(sequence)
            self._suspended[sequence] = place
        return True

    def resume(self, sequences: list[Sequence]) -> list[int] | None:
        """Regions for all seats of each request, then the copies; no sharing was lost, there is none."""
        coming: dict[Request, list[Sequence]] = {}
        for sequence in sequences:
            if sequence not in self._suspended:
                raise PluginContractError(f"contiguous: resume of sequence {sequence.id!r}, which is not suspended")
            coming.setdefault(sequence.request, []).append(sequence)
        taken: dict[Request, list[int]] = {}
        for request, members in coming.items():
            family, length = self._families.get(request), self.want(members[0])
            count = max(self._without_region(request), len(members)) - (len(family.spare) if family is not None else 0)
            starts = self._take(length, count)
            if starts is None:
                for other, given in taken.items():
                    self._give(given, self.want(other.sequences[0]))
                return None
            taken[request] = starts
        counts = []
        for sequence in sequences:
            place, count = self._suspended.pop(sequence)
            seat = self._open(sequence)
            self._add_spare(sequence.request, taken.pop(sequence.request, []))
            self._sit(sequence, seat)
            if count:
                self._move("in", place, seat.start, count)
            self._give_host(place, count)
            self.commit(sequence, count)
            counts.append(count)
        return counts

    def _give_host(self, start: int, count: int) -> None:
        if count:
            self._host.give(start, count)

    # --------------------------------------------------------------------- books

    def region(self, sequence: Sequence) -> tuple[int, int]:
        """First slot and length; an error before the first reserve."""
        seat = self._seats.get(sequence)
        if seat is None:
            raise self._not_open(sequence, "region")
        if not seat.length:
            raise PluginContractError(f"contiguous: sequence {sequence.id!r} has no region before its first reserve")
        return seat.start, seat.length

    def snapshot(self) -> list[BlockState]:
        """Regions; one that waits for a sequence is its request's."""
        held = [(seat.start, seat.length, sequence.id) for sequence, seat in self._seats.items() if seat.length]
        for request, family in self._families.items():
            held += [(start, family.length, request.id) for start in family.spare]
        return [BlockState(start, length, (owner,)) for start, length, owner in sorted(held)]

    def reset(self) -> None:
        """Nothing is cached."""

    def stats(self) -> KVStats:
        """Copies are of regions, one a fork."""
        return KVStats(copies=self._copies, transfers=self._moves)

    def usage(self) -> KVUsage:
        """From running counts; only the external waste looks at the free runs. What placement rounds up is external too."""
        free, rounding = self._space.free, self._space.rounding
        external = sum(length for _, length in self._space.runs if length < self._refused) if self._refused else 0
        return KVUsage(
            filled=self._num_filled,
            held=self.capacity - free - rounding - self._num_filled,
            external=external + rounding,
            cached=0,
            free=free - external,
            host=self.host_capacity - self._host.free,
        )

    def _move(self, kind: Literal["copy", "out", "in"], source: int, target: int, count: int) -> None:
        self._transfers.append(Transfer(kind, source, target, count))
        self._moves += 1

    def _tell(self, kind: Literal["taken", "released"], start: int, count: int, owner: str, *, filled: int = 0) -> None:
        """A region that no sequence has yet is its request's."""
        if self.observed:
            self._events.append(BlockEvent(kind, start, count, owner, filled=filled))

    def _not_open(self, sequence: Sequence, what: str) -> PluginContractError:
        where = "suspended" if sequence in self._suspended else "never opened, or closed already"
        return PluginContractError(f"contiguous: {what} of sequence {sequence.id!r}, which is {where}")

    def check(self) -> None:
        """Regions and free runs cover the pool once, host copies and free runs the host; counts agree with a recount."""
        regions = [(seat.start, seat.length) for seat in self._seats.values() if seat.length]
        regions += [(start, family.length) for family in self._families.values() for start in family.spare]
        self._space.check(regions)
        self._host.check((start, count) for start, count in self._suspended.values() if count)
        filled = sum(seat.num_filled for seat in self._seats.values())
        if filled != self._num_filled:
            raise PluginContractError(f"contiguous: {self._num_filled} slots are counted as filled, the sequences committed {filled}")
        for request, family in self._families.items():
            members = sum(sequence.request is request for sequence in self._seats)
            if not 0 < members == family.num_open:
                raise PluginContractError(f"contiguous: request {request.id!r} counts {family.num_open} open sequences, it has {members}")
        for sequence, seat in self._seats.items():
            if self._families.get(sequence.request) is not seat.family or seat.num_filled > seat.length:
                raise PluginContractError(f"contiguous: {sequence.id!r} sits wrong: {seat}")

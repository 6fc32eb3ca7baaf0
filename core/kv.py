"""What a KV-cache allocator is: it hands out slots of the pool to sequences, and knows no tensor.

A slot holds K and V of one token in all layers. Allocators deal in indices; the data moves by `Transfer`s that a runner applies.
Must not know: torch, schedulers, kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo.core.plan import Transfer
from octavo.core.request import Request, Sequence

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Slots by what they hold. filled + held + external + cached + free = capacity; a shared slot counts once."""

    filled: int  # KV written, owned by a live sequence
    held: int  # granted to a live sequence, nothing written yet
    external: int  # free, but in runs too short for the last refused reservation, or lost to rounding
    cached: int  # nobody's, kept for reuse, evictable
    free: int
    host: int = 0  # host slots holding suspended sequences; not part of the sum
    saved: int = 0  # more slots that live sequences would hold if none were shared; not part of the sum

    @property
    def share_saved(self) -> float:
        """Of the slots that live sequences would hold if none were shared, the share that sharing saves."""
        held = self.filled + self.held
        return self.saved / (held + self.saved) if self.saved else 0.0


@dataclass(frozen=True, slots=True)
class KVStats:
    """Counted since the pool was made; none of them goes down."""

    queried_tokens: int = 0  # prompt tokens looked up in a prefix cache, first admissions only
    hit_tokens: int = 0
    evictions: int = 0
    copies: int = 0  # blocks or regions copied because a shared one was about to be written
    transfers: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens looked up that were found, and whose prefill was saved."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One block or region changed hands. `owner` is a sequence's id, `key` the prefix hash in hex.

    `filled`, of one that is released: how many of its slots, the first ones, were written since it was taken from the free ones. Whoever
    gives it back last says what became of it.
    """

    kind: Literal["taken", "released", "cached", "evicted"]
    start: int  # first slot
    count: int  # slots
    owner: str = ""
    key: str = ""
    filled: int = 0


@dataclass(frozen=True, slots=True)
class BlockState:
    """What one block or region holds: of live sequences, or, without an owner, what is kept for reuse under its key."""

    start: int  # first slot
    count: int  # slots
    owners: tuple[str, ...] = ()  # ids of the sequences that share it; of a request, where it keeps a region for one
    key: str = ""  # prefix hash in hex, where it can be found by that


class Allocator(ABC):
    """Slots for sequences. `capacity` and `host_capacity` are in slots.

    `layout` says which of `table` and `region` an input builder may call; `block_size` goes with the first.
    A sequence is opened, grows by `reserve` and `commit`, may be forked, suspended and resumed, and is closed.
    """

    layout: Literal["region", "block_table"]
    capacity: int
    host_capacity: int = 0
    block_size: int = 0
    observed: bool = False  # events are recorded only while somebody drains them

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []
        self._events: list[BlockEvent] = []

    @abstractmethod
    def fits(self, *requests: Request) -> bool:
        """An otherwise empty pool carries all seats of these requests to their end, all at once."""

    def check_request(self, request: Request) -> None:
        """Refuse at submit what this allocator cannot serve for another reason than room. Raises RequestError that names the field."""

    @abstractmethod
    def open(self, sequence: Sequence) -> int:
        """Start a sequence; returns how many of its first positions are cached, pinned from now on (fewer than `num_tokens`).

        None where `Request.reads_cache` is False. Allocates nothing.
        """

    def coming(self, sequence: Sequence) -> tuple[int, int]:
        """First and stop of the positions that `open` would find for this waiting sequence (never opened, or closed) not now, but once
        open sequences have computed their prompts; an empty range where there are none, as in an allocator that finds nothing. Changes
        nothing.
        """
        return 0, 0

    @abstractmethod
    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Positions start .. stop - 1 are about to be written: see that their slots exist and are the sequence's alone.

        A block shared with others is copied first. False changes nothing; a grant lasts until `close`. A request's first reserve
        grants room for all its seats where forks need room of their own (regions).
        """

    @abstractmethod
    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of the first `num_tokens` positions is written, and may be shared from now on. Incremental."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Open `child` with the first `num_tokens` positions of `parent`, shared by reference count or copied. Cannot fail."""

    @abstractmethod
    def suspend(self, sequences: list[Sequence]) -> bool:
        """Keep the computed positions of all these in host memory and give their slots back; a shared block is kept once.

        All or nothing: False changes nothing.
        """

    @abstractmethod
    def resume(self, sequences: list[Sequence]) -> list[int] | None:
        """Bring suspended sequences back, sharing as it was, with room up to `num_tokens` each.

        Returns how many positions each has; None changes nothing.
        """

    @abstractmethod
    def close(self, sequence: Sequence) -> None:
        """Give everything back, the tail first; a suspended copy too."""

    def table(self, sequence: Sequence) -> tuple[npt.NDArray[np.int32], int]:
        """The sequence's block table and the first entry that changed since the last call (0 after open, fork and resume).

        For one reader, the input builder, which must not keep or change the array.
        """
        raise TypeError(f"{type(self).__name__} has layout {self.layout!r} and no block tables")

    def region(self, sequence: Sequence) -> tuple[int, int]:
        """First slot and length of the sequence's region."""
        raise TypeError(f"{type(self).__name__} has layout {self.layout!r} and no regions")

    def drain_transfers(self) -> list[Transfer]:
        """Data that must move before the next forward pass, in order; asked for once a plan."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def requeue(self, transfers: tuple[Transfer, ...]) -> None:
        """A step failed before these moved: they come first in the next plan, in their order."""
        self._transfers[:0] = transfers

    def drain_events(self) -> list[BlockEvent]:
        """Blocks that changed hands since the last call; empty unless `observed`."""
        events, self._events = self._events, []
        return events

    @abstractmethod
    def snapshot(self) -> list[BlockState]:
        """What each block or region holds now, by first slot; those that hold nothing are left out. Looks at the whole pool."""

    @abstractmethod
    def reset(self) -> None:
        """Drop what is cached for reuse. Live sequences keep theirs."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Counts since the start."""

    @abstractmethod
    def usage(self) -> KVUsage:
        """Where the slots are now."""

    def explain(self, request: Request) -> str:
        """Why the request's prefix was or was not found in the cache, in a sentence."""
        return f"{type(self).__name__} keeps nothing for reuse across requests"

    @abstractmethod
    def check(self) -> None:
        """Raise PluginContractError if an invariant is broken. Run after each step in tests and under `engine.debug`."""

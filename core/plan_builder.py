"""`PlanBuilder`: the only way to a `BatchPlan`. Keeps a step's token budget and the promises of a plan.

Promises: at most one chunk a sequence, every position of it reserved, at least one token, never over the budget; sequences that
wait for a chunk in flight are left out; nothing is planned for a request that the pool refused.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.errors import PluginContractError
from octavo.core.forks import rejoin
from octavo.core.kv import Allocator
from octavo.core.plan import BatchPlan, Chunk
from octavo.core.request import Request, Sequence


class Proposer(Protocol):
    """Guesses the next tokens of a sequence, for speculative decoding."""

    def __call__(self, sequence: Sequence) -> list[int]:
        """Draft ids that may follow the sequence's known tokens; empty: no guess."""


class PlanBuilder:
    """One step's plan in the making."""

    def __init__(self, kv: Allocator, *, budget: int, chunking: bool, proposer: Proposer | None = None) -> None:
        self.left = budget
        self.preempted: list[Request] = []
        self._kv = kv
        self._chunking = chunking
        self._proposer = proposer
        self._chunks: dict[Sequence, Chunk] = {}
        self._failed: dict[Request, str] = {}

    def __contains__(self, request: Request) -> bool:
        return not self._chunks.keys().isdisjoint(request.sequences)

    def __len__(self) -> int:
        """Chunks planned so far."""
        return len(self._chunks)

    def add(self, request: Request, limit: int | None = None) -> bool:
        """Plan what the request can run now, at most `limit` tokens of a sequence.

        False: the pool refused and nothing was planned. No budget left, sitting out for a chunk in flight, or having failed in this
        very step is True.
        """
        if not request.running:
            raise PluginContractError(f"request {request.id!r} was planned but is not running: admit it first")
        if request in self._failed:
            return True
        if request.restore is not None and request.sequences[0].num_computed >= request.restore:
            rejoin(self._kv, request)
        chunks, reserve, left = self._chunks, self._kv.reserve, self.left
        plain = limit is None and request.restore is None and not request.beam_width
        planned: list[Chunk] = []
        for sequence in request.runnable:
            if sequence.awaited is not None:
                return True
            if sequence in chunks:
                continue
            need = sequence.num_next if plain else _need(request, sequence, limit)
            length = need if need <= left else left if self._chunking else 0
            if length <= 0:
                continue
            start = sequence.num_scheduled
            stop = start + length
            if not reserve(sequence, start, stop):
                return False
            samples = stop >= sequence.num_tokens
            logits_from = stop - samples
            if not request.prompt_scored:
                logits_from = min(logits_from, max(start, len(request.prompt_logprobs)))
            planned.append(Chunk(sequence, start, length, logits_from, samples, (), sequence.epoch))
            left -= length
        if request.beam_width:
            planned = _lockstep(request, planned)
        for chunk in planned:
            chunks[chunk.sequence] = chunk
            self.left -= chunk.length
        return True

    def rest(self, request: Request) -> int:
        """Tokens that the request could run now and that are not planned."""
        chunks = self._chunks
        return sum(s.num_next - (chunks[s].length if s in chunks else 0) for s in request.runnable)

    def drop(self, request: Request) -> None:
        """Take the request's chunks back out; their tokens return to the budget, their slots stay granted."""
        for sequence in request.sequences:
            chunk = self._chunks.pop(sequence, None)
            if chunk is not None:
                self.left += chunk.length

    def fail(self, request: Request, reason: str) -> None:
        """The request cannot go on; the engine ends it with this reason, all others go on."""
        self.drop(request)
        self._failed.setdefault(request, reason)

    def build(self, *, wait_until: float | None = None, dead_rows: int = 0, idle_rows: int = 0) -> BatchPlan:
        """Freeze the plan, count its tokens as scheduled, and collect the transfers that must run before it.

        Drafts come last, from what is left of budget and pool, and preempt nobody.
        """
        chunks = tuple(self._chunks.values())
        if self._proposer is not None:
            chunks = tuple(self._with_drafts(chunk, self._proposer) for chunk in chunks)
        num_recomputed = 0
        for chunk in chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            sequence.num_scheduled = chunk.start + chunk.length
            if chunk.start < sequence.num_reached:
                num_recomputed += min(chunk.start + chunk.length, sequence.num_reached) - chunk.start
            if chunk.samples and (chunk.drafts or request.reads_output or request.samples_jointly):
                sequence.awaited = chunk
        return BatchPlan(
            chunks,
            tuple(self.preempted),
            tuple(self._failed.items()),
            tuple(self._kv.drain_transfers()),
            wait_until,
            dead_rows,
            idle_rows,
            num_recomputed,
        )

    def _with_drafts(self, chunk: Chunk, proposer: Proposer) -> Chunk:
        sequence, request = chunk.sequence, chunk.sequence.request
        room = min(self.left, sequence.max_positions - chunk.stop)
        known = chunk.samples and chunk.stop == sequence.num_tokens  # no placeholder among its tokens
        if room <= 0 or not known or request.reads_output or request.samples_jointly:
            return chunk
        drafts = tuple(proposer(sequence)[:room])
        if not drafts or not self._kv.reserve(sequence, chunk.start, chunk.stop + len(drafts)):
            return chunk
        self.left -= len(drafts)
        return chunk._replace(length=chunk.length + len(drafts), drafts=drafts)


def _need(request: Request, sequence: Sequence, limit: int | None) -> int:
    """Tokens that the sequence may run now, whatever the budget."""
    if request.restore is not None:
        need = request.restore - sequence.num_scheduled
    else:
        need = sequence.num_next
        if request.beam_width and request.forked and need > 1:
            need -= 1  # after a preemption, beams catch up first and then sample together
    return need if limit is None else min(need, limit)


def _lockstep(request: Request, planned: list[Chunk]) -> list[Chunk]:
    """Beams sample all in one step or not at all: the ones that are ready wait for the rest."""
    together = len(planned) == len(request.sequences) and all(chunk.samples for chunk in planned)
    if not request.forked or together:
        return planned
    return [chunk for chunk in planned if not chunk.samples]

"""Random requests, forks, suspensions, failures and ends against an allocator, two steps in flight, with tagged memory.

The machine does what engine, scheduler and runner do, in any order that they may. After each rule the allocator checks itself and its
usage adds up; each row of a step must read its own history and nothing else; at the end nothing is held.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.block_map import BlockMap
from octavo.core.forks import common_prefix, rejoin, split
from octavo.core.kv import Allocator, BlockState
from octavo.core.plan import Chunk, Transfer
from octavo.core.request import Request, Sequence, Status
from tests.plugins.allocators.memory import MAX_MODEL_LEN, Memory, request, tags

PICK = st.integers(0, 1_000)


class Row(NamedTuple):
    """A chunk as the runner took it at submit: later changes on the host must not matter."""

    chunk: Chunk
    slots: list[int]
    tags: list[int]


class Flight(NamedTuple):
    """A step in flight."""

    transfers: tuple[Transfer, ...]
    rows: list[Row]


def sorted_owners(states: list[BlockState]) -> list[BlockState]:
    return [replace(state, owners=tuple(sorted(state.owners))) for state in states]


class AllocatorMachine(RuleBasedStateMachine):
    """Derive and set `build`, and `seen`, where all runs count what occurred."""

    build: Callable[[], Allocator]
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.kv = type(self).build()
        self.memory = Memory(self.kv)
        self.requests: list[Request] = []
        self.tokens: dict[Sequence, list[int]] = {}  # known ones, and those that will be sampled
        self.planned: dict[Sequence, Chunk] = {}
        self.flights: deque[Flight] = deque()
        self.fresh = count(1_000)
        self.owners: Counter[tuple[int, str]] = Counter()  # by the events
        self.exact = True  # nobody wrote into a block after it was shared, or shares a part of a full one
        self.histories: list[list[int]] = [list(range(14))]  # what prompts may begin with: a text, and conversations that ended

    @initialize(observed=st.booleans())
    def observe(self, observed: bool) -> None:
        self.kv.observed = observed
        self.map = BlockMap()

    @rule()
    def look(self) -> None:
        """Somebody looks at what goes on already, or away again."""
        self.kv.observed = not self.kv.observed
        self.kv.drain_events()
        self.map = BlockMap(self.kv.snapshot())
        self.owners = Counter((state.start, owner) for state in self.kv.snapshot() for owner in state.owners)

    # -------------------------------------------------------------------- choice

    def open_sequences(self) -> list[Sequence]:
        return [s for one in self.requests for s in one.sequences if s.status is Status.OPEN]

    def having(self, status: Status) -> list[Request]:
        return [one for one in self.requests if any(s.status is status for s in one.sequences)]

    def unchanged(self, act: Callable[[], object]) -> object:
        """What `act` returns; if that is False or None, nothing may have changed."""
        before = self.picture()
        answer = act()
        if answer is False or answer is None:
            assert self.picture() == before, "a refusal changed something"
        return answer

    def picture(self) -> object:
        usage = self.kv.usage()
        transfers = tuple(self.kv.drain_transfers())
        self.kv.requeue(transfers)
        where = {s: self.memory.slots(s, s.num_computed) for s in self.open_sequences()}
        return usage.filled, usage.held, usage.cached, usage.free + usage.external, usage.host, transfers, where

    # ---------------------------------------------------------------- one request

    @rule(
        length=st.integers(1, 14),
        outputs=st.integers(1, 10),
        width=st.integers(1, 3),
        beams=st.booleans(),
        history=st.integers(-1, 3),
        salt=st.sampled_from(["", "", "", "a"]),
    )
    def add(self, length: int, outputs: int, width: int, beams: bool, history: int, salt: str) -> None:
        """A prompt is new (-1), or begins as others did."""
        assert length + outputs <= MAX_MODEL_LEN
        known = self.histories[-1 - history % len(self.histories)][:length] if history >= 0 else []
        one = request(
            [*known, *(next(self.fresh) for _ in range(length - len(known)))],
            outputs,
            n=1 if beams else width,
            beam_width=width if beams and width > 1 else 0,
            name=f"r{next(self.fresh)}",
            salt=salt,
        )
        if self.kv.fits(one) and len(self.requests) < 6:
            self.requests.append(one)
            self.tokens[one.sequences[0]] = list(one.prompt)
            self.admit(len(self.requests) - 1)

    @precondition(lambda self: self.having(Status.NEW))
    @rule(pick=PICK)
    def admit(self, pick: int) -> None:
        waiting = [one for one in self.requests if one.sequences[0].status is Status.NEW]
        if not waiting:
            return
        lead = waiting[pick % len(waiting)].sequences[0]
        hit = self.kv.open(lead)
        assert 0 <= hit < lead.num_tokens
        if not self.unchanged(lambda: self.kv.reserve(lead, hit, lead.num_tokens)):
            self.kv.close(lead)
            if not self.open_sequences() and not self.having(Status.SUSPENDED) and not self.flights:
                raise AssertionError(f"an empty pool refused a request that fits: {self.kv.usage()}")
            return
        lead.status, lead.num_computed, lead.num_scheduled = Status.OPEN, hit, hit

    @precondition(lambda self: self.open_sequences())
    @rule(pick=PICK, limit=st.integers(1, 8))
    def grow(self, pick: int, limit: int) -> None:
        sequences = self.open_sequences()
        self.plan(sequences[pick % len(sequences)], limit)

    def plan(self, sequence: Sequence, limit: int) -> None:
        one = sequence.request
        if one.restore is not None and one.sequences[0].num_computed >= one.restore:
            self.rejoin(one)
        if sequence not in one.runnable or sequence in self.planned or sequence.awaited is not None:
            return
        need = sequence.num_next if one.restore is None else one.restore - sequence.num_scheduled
        begin, length = sequence.num_scheduled, min(need, limit)
        if length <= 0 or not self.unchanged(lambda: self.kv.reserve(sequence, begin, begin + length)):
            return
        stop = begin + length
        samples = stop >= sequence.num_tokens
        self.planned[sequence] = Chunk(sequence, begin, length, stop - samples, samples, (), sequence.epoch)

    def rejoin(self, one: Request) -> None:
        (lead, *others), common = one.sequences, one.restore
        self.exact &= lead not in self.planned and lead.num_scheduled == lead.num_computed == common
        rejoin(self.kv, one)
        assert all(s.num_computed == common for s in others)  # the lead may be further: a hit

    # --------------------------------------------------------------------- steps

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def submit(self) -> None:
        rows = []
        for sequence, chunk in self.planned.items():
            known = self.tokens[sequence]
            while len(known) <= chunk.stop:
                known.append(next(self.fresh))
            rows.append(Row(chunk, self.memory.slots(sequence, chunk.stop), tags(known[: chunk.stop], sequence.request)))
            sequence.num_scheduled = chunk.stop
            one = sequence.request
            if chunk.samples and one.width > 1 and (one.beam_width or not one.forked):
                sequence.awaited = chunk
        self.planned.clear()
        self.flights.append(Flight(tuple(self.kv.drain_transfers()), rows))

    @precondition(lambda self: self.flights)
    @rule()
    def finish(self) -> None:
        flight = self.flights.popleft()
        self.memory.move(flight.transfers)
        pool, written = self.memory.pool, set[int]()
        for chunk, slots, expected in flight.rows:
            for position in range(chunk.start, chunk.stop):
                assert slots[position] not in written, f"two rows write slot {slots[position]}"
                written.add(slots[position])
                pool[slots[position]] = expected[position]
        for chunk, slots, expected in flight.rows:
            wrong = [p for p, slot in enumerate(slots) if pool[slot] != expected[p]]
            assert not wrong, f"{chunk.sequence.id} reads what is not its own at positions {wrong} of {chunk.start}..{chunk.stop}"
        for chunk, _, _ in flight.rows:
            if chunk.epoch == chunk.sequence.epoch:
                self.apply(chunk)

    def apply(self, chunk: Chunk) -> None:
        sequence, one = chunk.sequence, chunk.sequence.request
        if sequence.awaited is chunk:
            sequence.awaited = None
        sequence.num_computed = chunk.stop
        if not chunk.samples:
            self.kv.commit(sequence, chunk.stop)
        elif one.width > 1 and not one.forked:
            self.kv.commit(sequence, chunk.stop)
            for member in split(self.kv, sequence):
                known = self.tokens[member] = [*one.prompt, next(self.fresh)]
                member.output.append(known[-1])
            self.end_if_long(*one.sequences)
        else:
            sequence.output.append(self.tokens[sequence][sequence.num_tokens])
            self.kv.commit(sequence, min(chunk.stop, sequence.num_tokens - 1))
            self.end_if_long(sequence)

    def end_if_long(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            if len(sequence.output) >= sequence.request.max_tokens:
                self.end(sequence)

    @rule(limit=st.integers(1, 8), times=st.integers(1, 4))
    def steps(self, limit: int, times: int) -> None:
        """All that can run, some steps in a row: gets far."""
        for _ in range(times):
            for sequence in self.open_sequences():
                self.plan(sequence, limit)
            if len(self.flights) < 2:
                self.submit()
            self.finish()

    @precondition(lambda self: self.flights)
    @rule(moved=st.booleans())
    def fail(self, moved: bool) -> None:
        """The oldest step fails, perhaps after its transfers; all in flight are undone."""
        self.planned.clear()
        if moved:
            self.memory.move(self.flights[0].transfers)
        while self.flights:
            flight = self.flights.pop()
            for chunk, _, _ in flight.rows:
                if chunk.epoch == chunk.sequence.epoch:
                    chunk.sequence.num_scheduled, chunk.sequence.awaited = chunk.start, None
            if self.flights or not moved:
                self.kv.requeue(flight.transfers)

    # ---------------------------------------------------------------- preemption

    @precondition(lambda self: self.having(Status.OPEN))
    @rule(pick=PICK, swap=st.booleans())
    def preempt(self, pick: int, swap: bool) -> None:
        """To host memory if that has room, else to be computed again: the first alone up to where they part, then the others fork."""
        running = self.having(Status.OPEN)
        one = running[pick % len(running)]
        held = [s for s in one.sequences if s.status is Status.OPEN]
        for sequence in held:
            self.planned.pop(sequence, None)
        if swap and self.unchanged(lambda: self.kv.suspend(held)):
            for sequence in held:
                sequence.new_epoch(Status.SUSPENDED)
            return
        for sequence in held:
            self.kv.close(sequence)
            sequence.new_epoch(Status.NEW)
        if len(one.sequences) > 1:
            one.restore = common_prefix(one.sequences)

    @precondition(lambda self: self.having(Status.SUSPENDED))
    @rule(pick=PICK)
    def resume(self, pick: int) -> None:
        away = self.having(Status.SUSPENDED)
        one = away[pick % len(away)]
        kept = [s for s in one.sequences if s.status is Status.SUSPENDED]
        counts = self.unchanged(lambda: self.kv.resume(kept))
        if counts is None:
            assert self.open_sequences(), f"an empty pool refused what was suspended: {self.kv.usage()}"
            return
        assert isinstance(counts, list)
        for sequence, computed in zip(kept, counts, strict=True):
            sequence.status, sequence.num_computed, sequence.num_scheduled = Status.OPEN, computed, computed
            ready = self.memory.slots(sequence, sequence.num_tokens)  # room for what can run next
            assert len(ready) == sequence.num_tokens

    # ---------------------------------------------------------------------- ends

    @rule()
    def reset(self) -> None:
        """Live sequences keep theirs; nothing else is kept."""
        self.kv.reset()
        assert self.kv.usage().cached == 0

    def end(self, sequence: Sequence) -> None:
        one = sequence.request
        self.histories.append(sequence.tokens())
        held = sequence.status in (Status.OPEN, Status.SUSPENDED)
        one.sequences.remove(sequence)
        self.planned.pop(sequence, None)
        sequence.new_epoch(Status.DONE)
        if held:
            self.kv.close(sequence)
        if not one.sequences:
            self.requests.remove(one)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, whole=st.booleans())
    def leave(self, pick: int, whole: bool) -> None:
        """A request is aborted, wherever its KV is, or one of its sequences meets a stop."""
        one = self.requests[pick % len(self.requests)]
        if whole:
            for sequence in list(one.sequences):
                self.end(sequence)
        elif one.restore is None and all(s.status is Status.OPEN for s in one.sequences):
            self.end(one.sequences[pick % len(one.sequences)])

    @precondition(lambda self: any(one.beam_width and one.forked for one in self.requests))
    @rule(pick=PICK, parent=PICK, drop=st.booleans())
    def branch(self, pick: int, parent: int, drop: bool) -> None:
        """A beam is dropped, another forks; its last token is a different one."""
        searches = [one for one in self.requests if one.beam_width and one.forked and one.restore is None]
        searches = [one for one in searches if all(s.status is Status.OPEN for s in one.sequences)]
        if not searches:
            return
        one = searches[pick % len(searches)]
        if drop and len(one.sequences) > 1:
            self.end(one.sequences[pick % len(one.sequences)])
        heir = one.sequences[parent % len(one.sequences)]
        if len(one.sequences) == one.width or heir.num_computed < len(one.prompt):
            return
        self.exact &= heir not in self.planned and heir.num_scheduled == heir.num_computed
        kept = heir.num_computed - len(one.prompt)
        child = Sequence(f"{heir.id}+{next(self.fresh)}", one, output=[*heir.output[:kept], next(self.fresh)])
        one.sequences.append(child)
        self.tokens[child] = child.tokens()
        self.kv.fork(heir, child, heir.num_computed)
        child.status, child.num_computed, child.num_scheduled = Status.OPEN, heir.num_computed, heir.num_computed

    # ---------------------------------------------------------------- what holds

    @invariant()
    def books_agree(self) -> None:
        kv = self.kv
        kv.check()
        usage = kv.usage()
        assert usage.filled + usage.held + usage.external + usage.cached + usage.free == kv.capacity, usage
        assert min(usage.filled, usage.held, usage.external, usage.cached, usage.free, usage.host) >= 0, usage
        filled = len({slot for s in self.open_sequences() for slot in self.memory.slots(s, s.num_computed)})
        assert filled == usage.filled or (filled < usage.filled and not self.exact), f"{filled} distinct slots are filled: {usage}"
        tables = [self.starts(s) for s in self.open_sequences()] if kv.layout == "block_table" else []
        saved = sum(map(len, tables)) - len({start for table in tables for start in table})
        assert usage.saved == saved * kv.block_size, f"{saved} blocks are saved: {usage}"
        assert bool(usage.host) <= bool(self.having(Status.SUSPENDED)), usage

    @invariant()
    def events_tell_who_holds_what(self) -> None:
        events = self.kv.drain_events()
        assert not events or self.kv.observed
        for event in events:
            self.owners[event.start, event.owner] += {"taken": 1, "released": -1}.get(event.kind, 0)
        assert min(self.owners.values(), default=0) >= 0, "released by somebody who did not hold it"
        if self.kv.observed:
            self.map.apply(events)
            assert sorted_owners(self.map.states()) == sorted_owners(self.kv.snapshot()), "the events do not tell what is there"
            held = Counter((start, s.id) for s in self.open_sequences() for start in self.starts(s))
            ids = {s.id for s in self.open_sequences()}
            assert held == Counter({key: n for key, n in self.owners.items() if n and key[1] in ids})

    def starts(self, sequence: Sequence) -> list[int]:
        if self.kv.layout == "region":
            return [self.kv.region(sequence)[0]]
        self.memory.slots(sequence, 0)  # the one reader
        return [int(block) * self.kv.block_size for block in self.kv.table(sequence)[0]]

    def teardown(self) -> None:
        """Everybody leaves: nothing is held and all is free again."""
        while self.flights:
            self.finish()
        for one in list(self.requests):
            for sequence in list(one.sequences):
                self.end(sequence)
        kv = self.kv
        self.seen.update(asdict(kv.stats()))
        kv.reset()
        kv.check()
        usage = kv.usage()
        assert (usage.filled, usage.held, usage.cached, usage.host) == (0, 0, 0, 0), usage
        assert usage.free + usage.external == kv.capacity, usage
        if kv.observed:
            for event in kv.drain_events():
                self.owners[event.start, event.owner] += {"taken": 1, "released": -1}.get(event.kind, 0)
            assert not any(self.owners.values()), f"by the events somebody still holds {+self.owners}"

"""A runner without tensors, whose "KV" shows every mistake: a slot holds a position, its token, and the hash of the whole prefix.

A step takes its snapshot at `submit` and runs at `result` (or at once, `eager`), so that nothing which the host changes in between
may matter. Any row that reads a slot with another content, writes one that is not its own, gets a stale block table or lies outside
its grant raises `FakeRunnerError`. It can be told to fail, to see a step undone. Must not know: torch, policies, tests' frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from octavo.core.beam_search import Candidate
from octavo.core.execution import Runner, StepResult
from octavo.core.kv import Allocator
from octavo.core.logprobs import TokenLogprobs
from octavo.core.plan import BatchPlan, Chunk, Transfer
from octavo.core.request import Sequence
from octavo.core.testing.fake_model import best_candidates, draw, prefix_hash, score

Slot = tuple[int, int, int]
"""Position, token id, hash of the prefix up to and with it."""

UNKNOWN = -1  # an id that a step in flight samples


class FakeRunnerError(AssertionError):
    """The plan, an allocator or the engine broke a promise."""


class InjectedFailure(RuntimeError):
    """A failure that the test asked for."""


class FailurePoint(Enum):
    """Where a step fails."""

    SUBMIT = "in submit"
    BEFORE_TRANSFERS = "before its transfers"
    AMONG_TRANSFERS = "among its transfers"
    AFTER_TRANSFERS = "after its transfers"
    HALF_WRITTEN = "in the forward pass, with garbage in the slots of its rows"


@dataclass(frozen=True, slots=True)
class Row:
    """All that one chunk's computation reads; no reference to what the host may change."""

    name: str
    tokens: list[int]  # of positions 0 .. stop - 1; UNKNOWN where a step in flight samples it
    sampled_by: list[tuple[int, int]]  # (step, row) whose token each UNKNOWN is
    drafts: tuple[int, ...]
    start: int
    slots: list[int]  # of positions 0 .. stop - 1
    sampled_from: int | None  # first position from whose logits a token is drawn; None: nothing is sampled
    scored: range  # positions whose logits score the prompt's next token
    num_logprobs: int | None  # likeliest tokens that are wanted beside each sampled one's log probability; None: not even that one's
    num_prompt_logprobs: int
    num_candidates: int  # 0: no beam
    draws: range  # sample indices
    seed: int
    stop_ids: frozenset[int]
    min_tokens: int
    prompt: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last position."""
        return len(self.tokens)


@dataclass(slots=True)
class FakeHandle:
    """A step in flight."""

    runner: FakeRunner
    step: int
    transfers: tuple[Transfer, ...]
    rows: list[Row]
    failure: FailurePoint | None
    transfers_done: int = 0
    error: Exception | None = None
    answer: StepResult | None = None

    def result(self) -> StepResult:
        """Run all steps up to this one, in order, and return what this one produced."""
        self.runner.run_until(self)
        if self.error is not None:
            raise self.error
        if self.answer is None:
            raise FakeRunnerError(f"step {self.step} was forgotten, yet its result was asked for")
        return self.answer


@dataclass(slots=True)
class FakeStats:
    """What was done, so that a test can see that its case occurred."""

    steps: int = 0
    tokens: int = 0
    failures: int = 0
    placeholders: int = 0
    moved: dict[str, int] = field(default_factory=lambda: {"copy": 0, "out": 0, "in": 0})


class FakeRunner(Runner):
    """Executes plans with the model of `fake_model`. `failures` says at which submission (from 0) which failure happens."""

    def __init__(self, kv: Allocator, *, eager: bool = False, failures: Mapping[int, FailurePoint] | None = None) -> None:
        self.stats = FakeStats()
        self.plans: list[BatchPlan] = []  # all that were submitted
        self._kv = kv
        self._eager = eager
        self._failures = dict(failures or {})
        self._memory: list[Slot | None] = [None] * kv.capacity
        self._host: list[Slot | None] = [None] * kv.host_capacity
        self._queue: list[FakeHandle] = []
        self._broken = False  # after a failure nothing runs until `forget`
        self._results: dict[int, list[list[int]]] = {}
        self._sampling: dict[tuple[Sequence, int], list[tuple[int, int]]] = {}  # by sequence and epoch: the steps and rows that sample it
        self._tables: dict[Sequence, tuple[int, list[int]]] = {}  # what a reader of block tables would hold: epoch and entries

    # ------------------------------------------------------------------ submit

    def submit(self, plan: BatchPlan) -> FakeHandle:
        """Take a snapshot of the step. Raises InjectedFailure if it shall fail here."""
        step = self.stats.steps
        self.stats.steps += 1
        self.plans.append(plan)
        if len({chunk.sequence for chunk in plan.chunks}) < len(plan.chunks):
            raise FakeRunnerError("a sequence has two chunks in one plan")
        rows = [self._snapshot(step, number, chunk) for number, chunk in enumerate(plan.chunks)]
        failure = self._failures.get(step)
        self.stats.failures += failure is not None
        if failure is FailurePoint.SUBMIT:
            raise InjectedFailure(f"step {step} fails {failure.value}")
        handle = FakeHandle(self, step, plan.transfers, rows, failure)
        self._queue.append(handle)
        if self._eager:
            self.run_until(handle)
        return handle

    def _snapshot(self, step: int, number: int, chunk: Chunk) -> Row:
        sequence, request = chunk.sequence, chunk.sequence.request
        known_stop = chunk.stop - len(chunk.drafts)
        tokens = sequence.tokens(0, min(known_stop, sequence.num_tokens))
        missing = known_stop - len(tokens)
        history = self._sampling.setdefault((sequence, sequence.epoch), [])
        if missing > len(history):
            raise FakeRunnerError(f"{sequence.id}: {missing} tokens of step {step} are neither known nor in flight")
        if chunk.length < 1 or chunk.start < 0 or chunk.epoch != sequence.epoch:
            raise FakeRunnerError(f"{sequence.id}: {chunk} is no chunk that could run")
        sampled_from = known_stop - 1 if chunk.samples else chunk.stop
        scored = range(sampled_from, sampled_from)
        if request.params.prompt_logprobs is not None and chunk.start < len(request.prompt) - 1:
            scored = range(max(chunk.start, len(request.prompt_logprobs)), min(chunk.stop, len(request.prompt) - 1))
        if chunk.logits_from != (scored.start if scored else sampled_from) or chunk.sampled_from != sampled_from:
            raise FakeRunnerError(f"{sequence.id}: logits are wanted from {chunk.logits_from} of {chunk.start}..{chunk.stop}")
        self.stats.placeholders += missing
        row = Row(
            name=sequence.id,
            tokens=[*tokens, *[UNKNOWN] * missing, *chunk.drafts],
            sampled_by=history[len(history) - missing :],
            drafts=chunk.drafts,
            start=chunk.start,
            slots=self._slots(sequence, chunk.stop),
            sampled_from=sampled_from if chunk.samples else None,
            scored=scored,
            num_logprobs=request.params.num_logprobs if not request.beam_width else None,
            num_prompt_logprobs=request.params.prompt_logprobs or 0,
            num_candidates=request.num_candidates,
            draws=range(request.width)
            if request.width > 1 and not request.forked
            else range(sequence.sample_index, sequence.sample_index + 1),
            seed=request.seed,
            stop_ids=request.stop_ids,
            min_tokens=request.params.min_tokens,
            prompt=request.prompt,
        )
        if chunk.samples:
            history.append((step, number))
        return row

    def blocks(self, sequence: Sequence) -> list[int]:
        """The sequence's block table as it was last read."""
        return list(self._tables[sequence][1])

    def _slots(self, sequence: Sequence, stop: int) -> list[int]:
        """Physical slots of the first `stop` positions, as an input builder would find them."""
        kv = self._kv
        if kv.layout == "region":
            first, length = kv.region(sequence)
            if stop > length:
                raise FakeRunnerError(f"{sequence.id} runs to {stop}, its region has {length} slots")
            return list(range(first, first + stop))
        array, dirty_from = kv.table(sequence)
        table = array.tolist()
        epoch, held = self._tables.get(sequence, (-1, []))
        if epoch != sequence.epoch and dirty_from:
            raise FakeRunnerError(f"{sequence.id}: dirty_from is {dirty_from} although the table is new")
        if held[:dirty_from] != table[:dirty_from]:
            raise FakeRunnerError(f"{sequence.id}: the table changed before dirty_from = {dirty_from}: {held} became {table}")
        self._tables[sequence] = sequence.epoch, table
        size = kv.block_size
        if stop > len(table) * size:
            raise FakeRunnerError(f"{sequence.id} runs to {stop}, its table has {len(table)} blocks of {size}")
        return [table[position // size] * size + position % size for position in range(stop)]

    # --------------------------------------------------------------------- run

    def run_until(self, last: FakeHandle) -> None:
        """Run what was submitted up to `last`, in that order. After a failure nothing runs until `forget`."""
        while last in self._queue:
            handle = self._queue.pop(0)
            if self._broken:
                handle.error = InjectedFailure(f"step {handle.step} came after one that failed")
                continue
            try:
                handle.answer = self._run(handle)
            except InjectedFailure as error:
                handle.error, self._broken = error, True

    def forget(self) -> None:
        """Steps in flight were undone."""
        self._queue.clear()
        self._broken = False
        self._sampling.clear()

    def _run(self, handle: FakeHandle) -> StepResult:
        if handle.failure is FailurePoint.BEFORE_TRANSFERS:
            raise InjectedFailure(f"step {handle.step} fails {handle.failure.value}")
        for number, transfer in enumerate(handle.transfers):
            if handle.failure is FailurePoint.AMONG_TRANSFERS and number == len(handle.transfers) // 2:
                raise InjectedFailure(f"step {handle.step} fails {handle.failure.value}")
            self._move(transfer)
            handle.transfers_done += 1
        if handle.failure in (FailurePoint.AMONG_TRANSFERS, FailurePoint.AFTER_TRANSFERS):
            raise InjectedFailure(f"step {handle.step} fails {handle.failure.value}")
        self._check_exclusive(handle.rows)
        for row in handle.rows:
            self._write(row, garbage=handle.failure is FailurePoint.HALF_WRITTEN)
        if handle.failure is FailurePoint.HALF_WRITTEN:
            raise InjectedFailure(f"step {handle.step} fails {handle.failure.value}")
        tokens: list[list[int]] = []
        candidates: dict[int, list[Candidate]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for number, row in enumerate(handle.rows):
            prefixes = self._read(row)
            if row.scored:
                prompt_logprobs[number] = [score(prefixes[p], row.prompt[p + 1], row.num_prompt_logprobs) for p in row.scored]
            if row.sampled_from is not None and row.num_candidates:
                candidates[number] = best_candidates(prefixes[row.sampled_from], row.num_candidates)
                tokens.append([])
                continue
            drawn = _sample(row, prefixes)
            tokens.append([token for token, _ in drawn])
            if drawn and row.num_logprobs is not None:
                logprobs[number] = [score(prefix, token, row.num_logprobs) for token, prefix in drawn]
        self._results[handle.step] = tokens
        self._results.pop(handle.step - 8, None)
        return StepResult(tokens, candidates, logprobs, prompt_logprobs)

    def _move(self, transfer: Transfer) -> None:
        source = self._host if transfer.kind == "in" else self._memory
        target = self._host if transfer.kind == "out" else self._memory
        if transfer.count < 1 or not 0 <= transfer.source <= len(source) - transfer.count:
            raise FakeRunnerError(f"{transfer} reads outside its pool of {len(source)} slots")
        if not 0 <= transfer.target <= len(target) - transfer.count:
            raise FakeRunnerError(f"{transfer} writes outside its pool of {len(target)} slots")
        target[transfer.target : transfer.target + transfer.count] = source[transfer.source : transfer.source + transfer.count]
        self.stats.moved[transfer.kind] += transfer.count

    def _check_exclusive(self, rows: list[Row]) -> None:
        """A slot that one row writes is in no other row."""
        writer: dict[int, Row] = {}
        for row in rows:
            for slot in row.slots[row.start :]:
                if slot in writer:
                    raise FakeRunnerError(f"slot {slot} is written twice, for {writer[slot].name} and {row.name}")
                writer[slot] = row
        for row in rows:
            for slot in row.slots:
                if writer.get(slot, row) is not row:
                    raise FakeRunnerError(f"slot {slot} of {row.name} is written for {writer[slot].name}")

    def _write(self, row: Row, *, garbage: bool) -> None:
        first = row.stop - len(row.drafts) - len(row.sampled_by)
        for offset, (step, number) in enumerate(row.sampled_by):
            row.tokens[first + offset] = self._results[step][number][-1]
        before = self._memory[row.slots[row.start - 1]] if row.start else None
        prefix = before[2] if before is not None else 0
        for position in range(row.start, row.stop):
            prefix = prefix_hash(prefix, row.tokens[position])
            self._memory[row.slots[position]] = None if garbage else (position, row.tokens[position], prefix)
        self.stats.tokens += row.stop - row.start

    def _read(self, row: Row) -> list[int]:
        """Hashes of all prefixes of the row, from its slots; raises if any slot holds something else."""
        prefixes: list[int] = []
        prefix = 0
        for position, token in enumerate(row.tokens):
            prefix = prefix_hash(prefix, token)
            found = self._memory[row.slots[position]]
            if found != (position, token, prefix):
                raise FakeRunnerError(
                    f"{row.name} reads wrong KV: position {position} of {row.start}..{row.stop} in slot {row.slots[position]} "
                    f"should be token {token} of its prefix and is {found}"
                )
            prefixes.append(prefix)
        return prefixes


def _sample(row: Row, prefixes: list[int]) -> list[tuple[int, int]]:
    """One token for each draw, or the accepted drafts and one more; each with the prefix behind which it was drawn."""
    if row.sampled_from is None:
        return []
    at = row.sampled_from
    tokens = [(_draw(row, prefixes[at], at=at, sample_index=index), prefixes[at]) for index in row.draws]
    for draft in row.drafts:
        if tokens[-1][0] != draft:
            break
        at += 1
        tokens.append((_draw(row, prefixes[at], at=at, sample_index=row.draws[0]), prefixes[at]))
    return tokens


def _draw(row: Row, prefix: int, *, at: int, sample_index: int) -> int:
    early = at + 1 - len(row.prompt) < row.min_tokens
    return draw(prefix, seed=row.seed, sample_index=sample_index, banned=row.stop_ids if early else frozenset())

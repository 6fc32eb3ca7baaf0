"""`drive`: run a `Work` on an engine in this process, in one loop, on the engine's own clock, and record what each request saw.

Between two steps everything that is due is added; with nothing to do it sleeps until the next item is due. Requests are greedy, ignore
EOS and stream, so that it is known when each token came: at the end of its step. A request counts as sent
when it is due, though the engine sees it when the step that runs then is over: as at a server's door, where nobody is late for having to
wait. When it was handed over is in its record too (`added`). An item's id in the engine is its index in the work. A
class that the scheduler has no limits for runs as `default` and keeps its name in the records.
Must not know: HTTP, plugins, what is made of the records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress

from octavo.bench.agenda import Agenda
from octavo.bench.interrupts import HeldInterrupts, RunFailed, RunInterrupted
from octavo.bench.records import INTERRUPTED, RequestRecord
from octavo.bench.work import Work
from octavo.core.engine import Engine
from octavo.core.errors import EngineError, EngineStuckError, RequestError
from octavo.core.outputs import RequestOutput
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams

Progress = Callable[[RequestRecord], object]
"""Told of each request that is over."""

MOST_FAILURES = 3  # steps in a row; more, and the engine is not to be trusted


def drive(
    engine: Engine,
    work: Work,
    *,
    concurrency: int | None = None,
    zero: float | None = None,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> list[RequestRecord]:
    """One record an item, in the order of the work. Times in them are seconds on `engine.clock` after `zero`, by default now.

    Without `concurrency` items are sent at their `at` (open loop), with it so many at once, each as one ends (closed loop). `timeout_s`
    ends a request with what it has. Refusals and failures are records; a step that fails costs its requests. Raises RunInterrupted after
    Ctrl-C and RunFailed after several failed steps in a row, both with the records so far; EngineError if the engine has other work.
    """
    if engine.has_work:
        raise EngineError("the engine has work of its own: what a run measures must be all that runs")
    return _Run(engine, work, concurrency=concurrency, zero=zero, timeout_s=timeout_s, progress=progress).run()


def seats(engine: Engine, work: Work) -> int:
    """How many requests of a work run at once, at least 1: as many as `max_num_seqs` allows and the pool carries to their ends.

    Counted from the first item on, and as if nothing were found in a prefix cache. A pool that gives out blocks as tokens come admits
    more, and preempts some of them.
    """
    items = work.items[: engine.scheduler.options.max_num_seqs]
    requests = [
        Request(id="", prompt=(0,) * work.prompt_len(index), params=_params(item.output_len, None), max_tokens=item.output_len, seed=0)
        for index, item in enumerate(items)
    ]
    return max(1, bisect_left(range(1, len(requests) + 1), True, key=lambda count: not engine.kv.fits(*requests[:count])))


class _Run:
    def __init__(
        self,
        engine: Engine,
        work: Work,
        *,
        concurrency: int | None,
        zero: float | None,
        timeout_s: float | None,
        progress: Progress | None,
    ) -> None:
        self.engine = engine
        self.work = work
        self.agenda = Agenda(work, concurrency=concurrency)
        self.progress = progress
        self.records: dict[int, RequestRecord] = {}
        self.live: dict[str, RequestRecord] = {}
        self.contexts: dict[int, tuple[int, ...]] = {}  # prompts, with the turns before, of items that a later turn follows
        self.params = {length: _params(length, timeout_s) for length in {item.output_len for item in work.items}}
        self.failures = 0  # steps in a row
        self.zero = engine.clock.now() if zero is None else zero

    def run(self) -> list[RequestRecord]:
        with HeldInterrupts() as interrupts:
            try:
                self._until_done(interrupts)
                if not interrupts.came:
                    return self._in_order()
                self._cut_short()
                self._forget()
            except KeyboardInterrupt:  # the second one, in the middle of a step: the engine is left alone
                self._cut_short()
        raise RunInterrupted(self._in_order())

    def _until_done(self, interrupts: HeldInterrupts) -> None:
        """Or until Ctrl-C came."""
        engine, agenda, clock = self.engine, self.agenda, self.engine.clock
        while not interrupts.came:
            for index, due in agenda.due(clock.now() - self.zero):
                self._send(index, due)
            if engine.has_work:
                outputs = self._step()
                self._take(outputs, clock.now() - self.zero)
            elif agenda:
                if (when := agenda.next_due) is not None:
                    interrupts.sleep(clock.sleep_until, self.zero + when)
                continue
            else:
                break
            if engine.wait_until is not None:  # a policy waits for company, which may be due before
                when = agenda.next_due
                until = engine.wait_until if when is None else min(engine.wait_until, self.zero + when)
                interrupts.sleep(clock.sleep_until, until)

    def _in_order(self) -> list[RequestRecord]:
        return [self.records[index] for index in sorted(self.records)]

    def _send(self, index: int, due: float) -> None:
        item = self.work.items[index]
        prompt = item.prompt
        if item.after is not None:
            prompt = (*self.contexts[item.after], *self.records[item.after].token_ids, *prompt)
        if self.agenda.followed(index):
            self.contexts[index] = prompt
        now = self.engine.clock.now() - self.zero
        record = RequestRecord(
            index=index,
            num_prompt_tokens=len(prompt),
            max_tokens=item.output_len,
            due=due,
            sent=due,
            ended=now,
            class_name=item.class_name,
            added=now,
        )
        self.records[index] = record
        try:
            self.engine.add_request(
                prompt, self.params[item.output_len], request_id=str(index), class_name=self._class(item.class_name), stream=True
            )
        except RequestError as error:
            self._over(record, now, "refused", str(error))
        else:
            self.live[str(index)] = record

    def _class(self, name: str) -> str:
        return name if name in self.engine.scheduler.options.classes else "default"

    def _step(self) -> Iterable[RequestOutput]:
        try:
            outputs = self.engine.step()
        except Exception as error:
            self.failures += 1
            if isinstance(error, EngineStuckError) or self.failures > MOST_FAILURES:
                self._fail(f"the engine gave up: {error}")
                with suppress(Exception):  # a broken engine may not even be able to forget them
                    self._forget()
                raise RunFailed(self._in_order(), error) from error
            self.engine.fail_undone(error)
            return self.engine.answers.drain()
        self.failures = 0
        return outputs

    def _take(self, outputs: Iterable[RequestOutput], now: float) -> None:
        for output in outputs:
            record = self.live[output.request_id]
            piece = output.outputs[0]
            if tokens := piece.token_ids:
                record.token_ids += tokens
                record.token_times += [now] * len(tokens)
            if output.finished:
                del self.live[output.request_id]
                self._note(record, output)
                self._over(record, now, piece.finish_reason or "", piece.error or "")

    def _note(self, record: RequestRecord, output: RequestOutput) -> None:
        """What the engine says of a request that is over."""
        record.num_cached_tokens, record.num_preemptions = output.num_cached_tokens, output.num_preemptions
        if output.times is not None and output.times.first_scheduled is not None:
            record.first_scheduled = output.times.first_scheduled - self.zero

    def _over(self, record: RequestRecord, now: float, reason: str, error: str) -> None:
        record.ended, record.finish_reason, record.error = now, reason, error
        lost = self.agenda.ended(record.index, now, answered=record.succeeded)
        if self.progress is not None:
            self.progress(record)
        for index in lost:  # a conversation that broke off: its later turns count as asked for, and as failed
            self.records[index] = missed = RequestRecord.never_sent(self.work, index, now, because_of=record)
            if self.progress is not None:
                self.progress(missed)

    def _fail(self, why: str) -> None:
        """What is under way gets no answer, and later turns of it are never sent."""
        now = self.engine.clock.now() - self.zero
        for record in self.live.values():
            self._over(record, now, "error", why)

    def _cut_short(self) -> None:
        """What is under way was stopped by Ctrl-C."""
        now = self.engine.clock.now() - self.zero
        for record in self.live.values():
            record.ended, record.finish_reason, record.error = now, "abort", INTERRUPTED

    def _forget(self) -> None:
        """The engine does no more of it."""
        for request_id in self.live:
            self.engine.abort(request_id)
        for output in self.engine.answers.drain():
            if output.finished and (aborted := self.live.get(output.request_id)) is not None:
                self._note(aborted, output)
        self.live.clear()


def _params(length: int, timeout_s: float | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, known_output_len=length, timeout_s=timeout_s)

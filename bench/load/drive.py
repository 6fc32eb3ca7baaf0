"""`drive_http`: run a `Work` against a server, in an open or a closed loop, and record what each request saw.

The same agenda as in process (`octavo.bench.agenda`); answers are read after the run, but those that a later turn goes on from.
Must not know: engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from octavo.bench.agenda import Agenda
from octavo.bench.interrupts import HeldInterrupts, RunFailed, RunInterrupted
from octavo.bench.load.answers import fill, text_of
from octavo.bench.load.client import Pool, Record
from octavo.bench.load.target import Decode, Target, TargetError
from octavo.bench.load.workload import Ask
from octavo.bench.records import INTERRUPTED, RequestRecord
from octavo.bench.work import Work

Progress = Callable[[RequestRecord], object]
NOTHING = Ask({})  # what was asked is in the work
Said = tuple[int, ...] | tuple[str, ...] | str
"""Token ids, a text, or the messages of a chat."""


def drive_http(
    target: Target,
    work: Work,
    *,
    concurrency: int | None = None,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
    decode: Decode | None = None,
) -> list[RequestRecord]:
    """One record an item, in the order of the work. Times are seconds after the start on this process's clock.

    Without `concurrency` items are sent at their `at` (open loop), with it so many at once (closed loop). Whatever goes wrong is a record.
    `progress` is told of each request that is over, before its answer was read. `decode` is needed where the target takes no ids.
    Raises RunInterrupted after Ctrl-C and RunFailed where this client is at fault, both with the records so far; TargetError for a target
    that needs text and no `decode`.
    """
    if decode is None and _needs_text(target, work):
        raise TargetError(f"{target.url} takes text or gives no token ids to go on from: a tokenizer must make text (--tokenizer SOURCE)")
    run = _HttpRun(target, work, Agenda(work, concurrency=concurrency), timeout_s=timeout_s, progress=progress, decode=decode)
    failure: Exception | None = None
    try:
        asyncio.run(run.run())
    except KeyboardInterrupt:  # the second one, while the requests of the first one were being given up
        run.interrupted = True
    except Exception as error:
        failure = error
    with HeldInterrupts() as interrupts:
        records = run.read()
    if failure is not None:
        raise RunFailed(records, failure) from failure
    if run.interrupted or interrupts.came:
        raise RunInterrupted(records)
    return records


def _needs_text(target: Target, work: Work) -> bool:
    """A prompt cannot be sent as ids, or a later turn's be made of them."""
    return target.is_chat or not target.takes_ids or (not target.gives_ids and any(item.after is not None for item in work.items))


class _HttpRun:
    def __init__(
        self, target: Target, work: Work, agenda: Agenda, *, timeout_s: float, progress: Progress | None, decode: Decode | None
    ) -> None:
        self.target = target
        self.work = work
        self.agenda = agenda
        self.timeout_s = timeout_s
        self.progress = progress
        self.decode = decode
        self.as_text = _needs_text(target, work)
        self.records: dict[int, RequestRecord] = {}
        self.answers: dict[int, Record] = {}
        self.contexts: dict[int, Said] = {}  # of items that a later turn follows: prompt and answer
        self.pool = Pool(target.connect)
        self.live: dict[int, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()
        self.ready = {index: self._request(index) for index, item in enumerate(work.items) if item.after is None}
        self.zero = 0.0
        self.interrupted = False
        self.failure: Exception | None = None  # a fault of this client, not of the server

    async def run(self) -> None:
        self.zero = time.perf_counter()
        try:
            while self.agenda or self.live:
                for index, due in self.agenda.due(self._now()):
                    self.live[index] = asyncio.create_task(self._one(index, due))
                self.changed.clear()
                when = self.agenda.next_due
                try:
                    async with asyncio.timeout(None if when is None else max(0.0, when - self._now())):
                        await self.changed.wait()
                except TimeoutError:
                    pass
                if self.failure is not None:
                    raise self.failure
        except asyncio.CancelledError:  # Ctrl-C, as asyncio.run passes it on
            self.interrupted = True
            tasks = list(self.live.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self.pool.closed()

    def read(self) -> list[RequestRecord]:
        """The records in the order of the work, with what the answers say. To be called once, after the run."""
        records = [self.records[index] for index in sorted(self.records)]
        for record in records:
            if (answer := self.answers.get(record.index)) is not None:
                fill(record, answer, zero=self.zero)
            elif not record.error:  # it was under way
                record.finish_reason, record.error = "abort", INTERRUPTED
        return records

    def _now(self) -> float:
        return time.perf_counter() - self.zero

    def _prompt(self, index: int) -> Said:
        """With what was said before it."""
        item = self.work.items[index]
        new: Said = item.prompt
        if self.as_text and self.decode is not None:
            text = self.decode(item.prompt)
            new = (text,) if self.target.is_chat else text
        return new if item.after is None else self.contexts[item.after] + new  # type: ignore[operator]  # both are of one kind

    def _request(self, index: int) -> bytes:
        item = self.work.items[index]
        return self.target.ask(self._prompt(index), item.output_len, class_name=item.class_name)

    async def _one(self, index: int, due: float) -> None:
        item, now = self.work.items[index], self._now()
        record = RequestRecord(
            index=index,
            num_prompt_tokens=self.work.prompt_len(index),
            max_tokens=item.output_len,
            due=due,
            sent=now,
            ended=now,
            class_name=item.class_name,
        )
        self.records[index] = record
        try:
            request = self.ready.pop(index, None) or self._request(index)
            answer = await self.pool.send(NOTHING, request, due=due, timeout_s=self.timeout_s)
            self.answers[index] = answer
            record.sent, record.ended, record.num_retries = answer.sent - self.zero, answer.ended - self.zero, answer.num_retries
            answered = True
            if self.agenda.followed(index):
                answered = fill(record, answer, zero=self.zero).succeeded
                said: Said = tuple(record.token_ids)
                if self.as_text:
                    said = (text_of(answer),) if self.target.is_chat else text_of(answer)
                self.contexts[index] = self._prompt(index) + said  # type: ignore[operator]
            self._over(record, answered)
        except asyncio.CancelledError:
            record.ended, record.finish_reason, record.error = self._now(), "abort", INTERRUPTED
            raise
        except Exception as error:
            self.failure = error
            record.ended, record.finish_reason, record.error = self._now(), "error", f"{type(error).__name__}: {error}"
        finally:
            self.live.pop(index, None)
            self.changed.set()

    def _over(self, record: RequestRecord, answered: bool) -> None:
        now = self._now()
        lost = self.agenda.ended(record.index, record.ended, answered=answered)
        if self.progress is not None:
            self.progress(record)
        for index in lost:
            self.records[index] = missed = RequestRecord.never_sent(self.work, index, now, because_of=record)
            if self.progress is not None:
                self.progress(missed)

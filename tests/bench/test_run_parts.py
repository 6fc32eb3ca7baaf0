"""A run that is stopped and gone on with is one run whose records are whole, and each of its parts holds by its own clock."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.drive import drive
from octavo.bench.interrupts import RunInterrupted
from octavo.bench.records import INTERRUPTED, RequestRecord
from octavo.bench.reports.run_report import run_report
from octavo.bench.run_parts import apart, joined, rest_of
from octavo.bench.runs import Run
from octavo.bench.self_checks import failed_checks
from octavo.bench.step_log import StepLog
from octavo.bench.work import Item, Work
from octavo.core.errors import ResultError
from tests.bench.measured import TimedRunner, some_work
from tests.bench.pools import ALLOCATORS, rig

CONVERSATION = Work(
    name="talk",
    items=[
        Item(prompt=(1, 2, 3), output_len=4),
        Item(prompt=(2, 1), output_len=6, at=1.0),
        Item(prompt=(3,), output_len=3, after=0, pause=2.0),
        Item(prompt=(2,), output_len=2, after=1, pause=1.0),
        Item(prompt=(1,), output_len=2, after=3),
    ],
)


def part(work: Work, *, stop_after: int | None = None, allocator: str = "prefix", concurrency: int | None = None, **options: Any) -> Run:
    """Of a fresh engine on a clock of its own, whose steps take half a second; Ctrl-C comes when so many requests are over."""
    made = rig(allocator, "continuous", slots=60, **options)
    made.engine.runner = TimedRunner(made.runner, made.clock)
    log, over = StepLog(made.clock.now()), []

    def progress(record: RequestRecord) -> None:
        over.append(record)
        if len(over) == stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    run = Run(work=work, records=[], settings={"concurrency": concurrency})
    with log.watching(made.engine):
        try:
            run.records = drive(made.engine, work, zero=log.zero, concurrency=concurrency, progress=progress)
        except RunInterrupted as stopped:
            run.records, run.complete, run.stopped_by = stopped.records, False, str(stopped)
    run.steps = log.lines
    return run


def gone_on(work: Work, *stops: int, **how: Any) -> Run:
    """Stopped after so many requests, each time."""
    run = part(work, stop_after=stops[0], **how)
    for stop in (*stops[1:], None):
        rest = rest_of(run)
        run = joined(run, part(rest.work, stop_after=stop, **how), rest)
    return run


@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize("allocator", list(ALLOCATORS))
@pytest.mark.parametrize("work", [some_work(), CONVERSATION], ids=lambda work: work.name)
@pytest.mark.parametrize("stops", [(1,), (2, 1)])
def test_a_run_in_parts_is_whole(work: Work, stops: tuple[int, ...], allocator: str, concurrency: int | None) -> None:
    """Each item has one record, with as many tokens as in a run of one piece; all self-checks hold, and the pool's account is of all."""
    whole = part(work, allocator=allocator, concurrency=concurrency)
    run = gone_on(work, *stops, allocator=allocator, concurrency=concurrency)
    assert run.complete and len(run.parts) == len(stops) + 1
    assert [record.index for record in run.records] == list(range(len(work.items)))
    assert [len(record.token_ids) for record in run.records] == [len(record.token_ids) for record in whole.records]
    assert [record.num_prompt_tokens for record in run.records] == [record.num_prompt_tokens for record in whole.records]
    assert failed_checks(run) == []
    assert run.account.shares.total == pytest.approx(100) and run.account.undecided == 0
    starts = [line.start for line in run.steps]
    assert starts == sorted(starts) and [line.step for line in run.steps] == sorted(line.step for line in run.steps)
    assert run.parts[1].start == max(line.end for line in run.steps[: run.parts[1].first_step])
    assert run.account.prefix.queried_tokens == sum(one.account.prefix.queried_tokens for one in apart(run))


def test_what_was_cut_short_is_kept_and_asked_again() -> None:
    """It is no failure of the whole, and its steps are accounted for in its part."""
    run = gone_on(some_work(), 2)
    assert run.parts[0].cut_short and all(record.error == INTERRUPTED for record in run.parts[0].cut_short)
    assert all(record.succeeded for record in run.records)
    first = apart(run)[0]
    over = sum(record.ended <= run.parts[1].start for record in run.records)
    assert not first.complete and over >= 2 and len(first.records) == over + len(run.parts[0].cut_short)
    report = run_report(run, plots=False).markdown
    assert f"Measured in 2 parts**, begun unknown (from 0.0 s), unknown (from {run.parts[1].start:.1f} s)" in report
    assert f"under way at a stop: {len(run.parts[0].cut_short)}." in report


def test_an_open_loop_goes_on_by_the_runs_clock() -> None:
    """What was due later still is, and nothing is due before the part begins."""
    run = gone_on(some_work(), 2)
    second = run.parts[1].start
    later = [record for record in run.records if record.ended > second]
    assert later and all(record.due == max(second, run.work.items[record.index].at) for record in later)


BROKEN: dict[str, tuple[Callable[[Run], Run], str]] = {
    "a token that ran twice in a later part": (
        lambda run: replace(run, steps=[*run.steps[:-1], replace(run.steps[-1], num_tokens=run.steps[-1].num_tokens + 1)]),
        "part 2: steps ran",
    ),
    "requests that nobody saw wait in the first part": (
        lambda run: replace(run, steps=[*(replace(line, num_waiting=0, num_running=1) for line in run.steps[:8]), *run.steps[8:]]),
        "part 1: the steps saw",
    ),
    "one clock for both": (lambda run: replace(run, parts=[]), "steps ran"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_checks_of_a_part_can_fail(name: str) -> None:
    """Each says of which part."""
    change, words = BROKEN[name]
    run = gone_on(some_work(), 8)
    assert failed_checks(run) == []
    assert any(one.problem.startswith(words) for one in failed_checks(change(run)))


def test_a_run_in_parts_is_saved_whole(tmp_path: Path) -> None:
    """With its parts and what was cut short."""
    run = gone_on(CONVERSATION, 2)
    run.arguments, run.counted = {"seed": 3}, {"preemptions": None}
    run.save(tmp_path / "run")
    back = Run.load(tmp_path / "run")
    assert back == replace(run, work=replace(run.work, items=list(run.work.items)))


def test_a_turn_whose_answer_is_unknown_cannot_go_on() -> None:
    """As of a server that gives text alone."""
    run = part(CONVERSATION, stop_after=1)
    for record in run.records:
        record.token_ids = []
    with pytest.raises(ResultError, match="item 2 goes on from an answer whose token ids are not known"):
        rest_of(run)


def test_the_rest_of_a_conversation_that_broke_off_is_named_by_its_own_item() -> None:
    """Not by its place in the rest."""
    run = part(CONVERSATION, stop_after=1)
    rest = rest_of(run)
    assert rest.indices[0] == 2  # a turn that is due comes first
    later = Run(work=rest.work, records=[])
    failed = RequestRecord(index=1, num_prompt_tokens=1, max_tokens=1, due=0, sent=0, ended=1, finish_reason="error", error="no")
    later.records = [failed, RequestRecord.never_sent(rest.work, 2, 1.0, because_of=failed)]
    found = joined(run, later, rest)
    assert [record.error for record in found.records if record.index == rest.indices[2]] == [
        f"not sent: item {rest.indices[1]}, which it goes on from, has no answer (error)"
    ]

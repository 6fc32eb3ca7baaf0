"""Each check passes good runs of every stack, and fails a run in which one number was changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from octavo.bench.ablation.summary import summarise
from octavo.bench.check_lines import check_lines
from octavo.bench.identity import ServerIdentity
from octavo.bench.reports.run_report import run_report
from octavo.bench.runs import Run
from octavo.bench.self_checks import CHECKS, OF_TIME, TABLE, TWICE, Checked, DoesNotApply, a_a, a_a_of_runs, failed_checks, run_checks
from tests.bench.ablation.made import made_run
from tests.bench.measured import measured, timed
from tests.bench.pools import ALLOCATORS, SCHEDULERS
from tests.matrix.stacks import stack_reports
from tests.models import tiny


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_good_runs_pass(scheduler: str, allocator: str) -> None:
    """All checks, through a pool that makes requests wait and preempts; some are given to the engine as late as a step is long."""
    run = timed(allocator, scheduler)
    assert failed_checks(run) == [] and max(record.send_lag for record in run.records) > 0


def test_good_runs_with_swapping_pass() -> None:
    """What is swapped comes back and is not computed again."""
    for options in ({"host": 100, "preemption": "swap", "slots": 36}, {"slots": 36}):
        run = timed("paged", "continuous", **options)
        assert sum(line.num_preempted for line in run.steps) > 0
        assert any(line.num_recomputed for line in run.steps) == ("host" not in options)
        assert failed_checks(run) == []


STACKS = [report.stack for report in stack_reports(tiny("llama_gqa")) if report.runs and report.stack.model.name == "llama"]


@pytest.mark.parametrize("stack", [s for s in STACKS if s.kernel.name == "sdpa"], ids=lambda s: f"{s.scheduler.name}-{s.allocator.name}")
def test_real_runs_pass(stack: Any) -> None:
    """All checks but those of which this machine's other work decides."""
    assert [one for one in failed_checks(measured(stack)) if not one.of_time] == []


@cache
def good() -> Run:
    """Preempted, recomputed, with two prompts that share."""
    return timed("paged", "chunked")


def replace_records(run: Run, change: Callable[[Any], Any]) -> Run:
    return replace(run, records=[change(record) for record in run.records])


def one_record(run: Run, **changes: Any) -> Run:
    return replace(run, records=[replace(run.records[0], **changes), *run.records[1:]])


def one_step(run: Run, at: int = 3, **changes: Any) -> Run:
    steps = list(run.steps)
    steps[at] = replace(steps[at], **changes)
    return replace(run, steps=steps)


def usage(run: Run, at: int, name: str, **changes: int) -> Run:
    return one_step(run, at, **{name: replace(getattr(run.steps[at], name), **changes)})


def later(times: list[float]) -> list[float]:
    return [times[0] + 0.5, *times[1:]]


BROKEN: dict[str, tuple[str, Callable[[Run], Run], str]] = {
    "a slot too many in a step": ("shares sum to 100", lambda r: usage(r, 3, "usage_running", free=999), "60 slots in the first step"),
    "a negative share": ("shares sum to 100", lambda r: usage(r, 3, "usage_running", free=-5, external=65 - 60 + 60), "slots"),
    "a slot held at the end": ("pool empty at the end", lambda r: usage(r, -1, "usage", held=4, free=56), "hold 4 slots"),
    "a host slot held at the end": ("pool empty at the end", lambda r: usage(r, -1, "usage", host=4), "4 of host memory"),
    "a block never given back": ("pool empty at the end", lambda r: one_step(r, -1, events=()), "were never given back"),
    "a step that wrote more than it held": ("no slot counted twice", lambda r: one_step(r, num_tokens=40), "40 were written"),
    "blocks that were given back emptier than usage says": (
        "no slot counted twice",
        lambda r: replace(r, steps=[replace(s, events=tuple(replace(e, filled=0) for e in s.events)) for s in r.steps]),
        "more than there were",
    ),
    "a first token too early": (
        "TTFT + gaps = end to end",
        lambda r: one_record(r, sent=r.records[0].token_times[0] + 1, ended=r.records[0].ended + 9),
        "before what it follows",
    ),
    "an end too late": ("TTFT + gaps = end to end", lambda r: one_record(r, ended=r.records[0].ended + 0.5), "from end to end"),
    "tokens out of order": (
        "TTFT + gaps = end to end",
        lambda r: replace(r, records=[*r.records[:2], replace(r.records[2], token_times=r.records[2].token_times[::-1]), *r.records[3:]]),
        "before what it follows",
    ),
    "requests that nobody saw wait": (
        "Little's law",
        lambda r: replace(r, steps=[replace(line, num_waiting=0) for line in r.steps]),
        "requests waiting or running",
    ),
    "a part that is missing": (
        "step parts cover the steps",
        lambda r: replace(r, steps=[replace(line, seconds={"forward": 0.97 * line.seconds["forward"]}) for line in r.steps]),
        "97.0% are accounted for",
    ),
    "a client that falls behind": ("sent on time", lambda r: replace_records(r, lambda x: replace(x, added=x.added + 2.0)), "late (p99)"),
    "a client that falls behind while nothing runs": (
        "sent on time",
        lambda r: replace_records(r, lambda x: replace(x, due=-5.0, added=-0.5)),
        "4.5000 s late (p99)",
    ),
    "a client over HTTP that falls behind": (
        "sent on time",
        lambda r: replace(replace_records(r, lambda x: replace(x, due=x.sent - 0.2, added=None)), steps=[]),
        "0.2000 s late (p99)",
    ),
    "an end over HTTP long after the last token": (
        "TTFT + gaps = end to end",
        lambda r: replace(one_record(r, ended=r.records[0].ended + 30), steps=[]),
        "from end to end",
    ),
    "a token without a time": (
        "a time for each token",
        lambda r: one_record(r, token_ids=[*r.records[0].token_ids, 1]),
        "2 tokens came at 1 times",
    ),
    "a token that ran twice": (
        "tokens planned = delivered + recomputed",
        lambda r: one_step(r, num_tokens=r.steps[3].num_tokens + 1),
        "steps ran",
    ),
    "a recomputed token uncounted": (
        "tokens planned = delivered + recomputed",
        lambda r: replace(r, steps=[replace(line, num_recomputed=0) for line in r.steps]),
        "0 were computed again",
    ),
    "a request that was not asked for so long": (
        "tokens planned = delivered + recomputed",
        lambda r: one_record(r, num_prompt_tokens=r.records[0].num_prompt_tokens + 1),
        "answers needed",
    ),
    "requests that each took longer than the whole run": (
        TABLE,
        lambda r: replace_records(r, lambda x: replace(x, sent=x.sent - 1000)),
        "is longer than the whole run",
    ),
}


def test_the_good_run_is_good_and_hard() -> None:
    assert failed_checks(good()) == []
    assert sum(line.num_preempted for line in good().steps) > 0 and sum(line.num_recomputed for line in good().steps) > 0


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_fails_where_one_number_is_changed(name: str) -> None:
    """The check that is meant, and it says the figures."""
    check, change, words = BROKEN[name]
    problem = CHECKS[check](change(good()))
    assert problem is not None and words in problem


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_named_and_not_an_error(name: str) -> None:
    """All checks together, a summary and a report survive it, whichever number was changed; the check that is meant is among them."""
    check, change, _ = BROKEN[name]
    run = change(good())
    assert check in [problem.check for problem in failed_checks(run)]
    assert summarise([run, good()]).kv_shares
    assert check in run_report(run, plots=False).markdown


def test_every_check_can_fail() -> None:
    """Each is broken above."""
    assert {check for check, _, _ in BROKEN.values()} == set(CHECKS)


def test_a_run_without_steps_is_checked_as_far_as_it_goes() -> None:
    """Over HTTP there is no step log; nothing to say is no problem."""
    assert failed_checks(replace_records(replace(good(), steps=[]), lambda record: replace(record, added=None))) == []
    assert failed_checks(Run(work=good().work, records=[])) == []


def not_applicable(run: Run) -> dict[str, str]:
    return {one.check: one.not_applicable for one in run_checks(run) if one.not_applicable}


def test_what_cannot_be_checked_says_why() -> None:
    """It neither passed nor failed: no steps, over HTTP; no requests; too few; an interrupted run; a clock that stood still."""
    of_steps = ["shares sum to 100", "pool empty at the end", "no slot counted twice", "Little's law", "step parts cover the steps"]
    of_steps.append("tokens planned = delivered + recomputed")
    assert not_applicable(good()) == {}
    assert not_applicable(replace(good(), steps=[])) == dict.fromkeys(of_steps, "no step was seen")
    behind = ServerIdentity(date="", url="u", endpoint="/v1/completions", model="m")
    assert not_applicable(replace(good(), steps=[], server=behind))["Little's law"] == "the engine's steps are out of sight, behind HTTP"
    assert len(not_applicable(Run(work=good().work, records=[]))) == len(CHECKS)
    few = [record for record in good().records if record.index < 3]
    assert not_applicable(replace(good(), records=few))["Little's law"].startswith("3 requests were in the system, and of fewer than 8")
    assert not_applicable(replace(good(), complete=False)) == {"pool empty at the end": "the run was interrupted"}
    undone = one_step(good(), error="EngineError: no")
    assert not_applicable(undone)["tokens planned = delivered + recomputed"] == "1 steps failed, and what they had run is not known"
    changed = usage(good(), 3, "usage_running", free=999)
    assert not_applicable(changed)["pool empty at the end"] == "the pool has no account, as another check says"
    still = replace(good(), steps=[replace(line, start=1.0, end=1.0) for line in good().steps])
    assert not_applicable(still)["step parts cover the steps"] == "the steps took no time"


def test_what_became_of_checks_in_words() -> None:
    """Those that failed one by one, the others in a line, with how many of them where there are several runs; and why in a line each."""
    runs = {"s/a/0": [Checked("one"), Checked("two", problem="1 is not 2")], "s/a/1": [Checked("one"), Checked("two")]}
    runs["s/b/0"] = [Checked("one", not_applicable="it has no steps"), Checked("two", not_applicable="it has no steps")]
    assert check_lines(runs).markdown == [
        "* FAILED: s/a/0: two: 1 is not 2",
        "* passed: one (2 of 3), two (1 of 3)",
        "* not applicable: one (1 of 3), two (1 of 3): it has no steps",
    ]
    assert check_lines({"": [Checked("one"), Checked("two", problem="1 is not 2")]}).markdown == [
        "* FAILED: two: 1 is not 2",
        "* passed: one",
    ]
    assert check_lines({}).markdown == []


def test_what_may_be_allowed() -> None:
    """Checks that a busy machine can fail, and no others."""
    assert set(OF_TIME) <= {*CHECKS, TWICE}
    for check in (*CHECKS, TWICE):
        one = Checked(check, problem="1 is not 2")
        assert one.fails(allow_noise=False) and one.fails(allow_noise=True) == (check not in OF_TIME)
        assert not Checked(check).fails(allow_noise=False) and not Checked(check, not_applicable="x").fails(allow_noise=False)


def test_an_interrupted_run_may_hold_slots() -> None:
    """And says so itself."""
    with pytest.raises(DoesNotApply, match="interrupted"):
        CHECKS["pool empty at the end"](replace(usage(good(), -1, "usage", held=4), complete=False))


def test_requests_that_never_came_are_in_no_queue() -> None:
    """Later turns of a conversation that broke off, and refused requests: nobody saw them wait."""
    run = good()
    ghosts = [
        replace(
            run.records[0], index=90 + n, due=n, sent=n, ended=n, token_times=[], token_ids=[], finish_reason=reason, first_scheduled=None
        )
        for n, reason in enumerate(["", "", "refused", "refused"])
    ]
    assert failed_checks(replace(run, records=[*run.records, *ghosts])) == []


def test_the_same_stack_twice() -> None:
    """Up to 3 % apart is noise that is small enough."""
    assert a_a([1.0, 1.1, 0.9], [1.02, 1.12, 0.8]) is None
    assert a_a([1.0, 10.0], [1.1, 9.1]) is None  # pairs, which had the same work
    for nothing in (0.0, math.nan, math.inf):
        assert "cannot be compared with itself" in str(a_a([nothing], [nothing]))
    assert "+4.0%" in str(a_a([1.0], [1.04])) and "-4.0%" in str(a_a([1.0], [0.96]))
    run = good()
    slower = replace_records(run, lambda record: replace(record, ended=record.ended * 1.05))
    assert a_a_of_runs(run, run) is None and "+5.0%" in str(a_a_of_runs(run, slower))


def test_an_answer_over_http_ends_after_its_last_token() -> None:
    """With the connection's last bytes, and at most half a second later; never before. An engine in this process ends with the token."""
    run = made_run(4.0)
    check = CHECKS["TTFT + gaps = end to end"]
    for late, steps, fails in (
        (0.05, [], False),
        (0.49, [], False),
        (0.51, [], True),
        (-0.05, [], True),
        (0.05, run.steps, True),
        (-0.05, run.steps, True),
    ):
        records = [replace(one, ended=one.ended + late) for one in run.records]
        assert (check(replace(run, records=records, steps=steps)) is not None) is fails

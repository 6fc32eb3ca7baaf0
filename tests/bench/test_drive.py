"""A work on an engine in this process: what is sent when, and what each record says. Steps take a second; the clock is a test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from octavo.bench.drive import drive
from octavo.bench.interrupts import RunFailed, RunInterrupted
from octavo.bench.records import RequestRecord
from octavo.bench.work import Item, Work
from octavo.core.errors import EngineError, EngineStuckError
from octavo.core.outputs import RequestOutput, StepReport
from octavo.core.testing.fake_runner import FailurePoint, InjectedFailure
from octavo.core.testing.random_runs import MAX_MODEL_LEN
from octavo.core.testing.rig import Rig
from octavo.plugins.schedulers.static import STATIC
from tests.bench.conftest import STEP_S

NewRig = Callable[..., Rig]


def work(*items: Item) -> Work:
    return Work(name="test", items=items)


def item(prompt: int = 3, output: int = 2, **fields: object) -> Item:
    return Item(prompt=tuple(1 + n % 3 for n in range(prompt)), output_len=output, **fields)  # type: ignore[arg-type]


def times(record: RequestRecord) -> tuple[float, float, list[float], float]:
    return record.due, record.sent, record.token_times, record.ended


def test_an_open_loop_sends_each_item_at_its_time(new_rig: NewRig) -> None:
    """Not before; what falls due within a step right after it, and waits from when it was due. Tokens count from the end of their step."""
    rig = new_rig()
    first, second, third = drive(rig.engine, work(item(output=2), item(at=0.5), item(at=10.0)))
    assert times(first) == (0.0, 0.0, [1.0, 2.0], 2.0)
    assert times(second) == (0.5, 0.5, [2.0, 3.0], 3.0)
    assert times(third) == (10.0, 10.0, [11.0, 12.0], 12.0)
    assert [record.finish_reason for record in (first, second, third)] == ["length"] * 3
    assert (first.first_scheduled, second.first_scheduled, first.ttft, second.ttft) == (0.0, 1.0, 1.0, 1.5)
    assert len(rig.plans) == 5
    assert [record.added for record in (first, second, third)] == [0.0, 1.0, 10.0] and second.send_lag == 0.5


def test_times_are_after_the_given_zero(new_rig: NewRig) -> None:
    """The engine's clock may have run for a while; `zero` can lie before the call, for a log that began then."""
    rig = new_rig()
    rig.clock.advance(100.0)
    (record,) = drive(rig.engine, work(item(at=1.0)))
    assert times(record) == (1.0, 1.0, [2.0, 3.0], 3.0)
    (record,) = drive(rig.engine, work(item(at=1.0)), zero=rig.clock.now() - 5.0)
    assert times(record) == (1.0, 1.0, [6.0, 7.0], 7.0)


class Answered:
    """An observer that keeps the whole answers, by id."""

    def __init__(self, rig: Rig) -> None:
        self.answers: dict[str, RequestOutput] = {}
        rig.engine.observers.add(self)

    def octavo_request_finished(self, output: RequestOutput) -> None:
        """Keep it."""
        self.answers[output.request_id] = output


def test_the_tokens_are_those_of_the_engine(new_rig: NewRig) -> None:
    """The records hold what the engine itself says of each request; its id there is the item's index."""
    rig = new_rig()
    engine = Answered(rig)
    items = [item(prompt=length, output=5) for length in (1, 4, 9)]
    for index, record in enumerate(drive(rig.engine, work(*items))):
        answer = engine.answers[str(index)]
        assert answer.outputs[0].token_ids == record.token_ids and len(record.token_times) == 5
        assert answer.prompt_token_ids == list(items[index].prompt)
        assert answer.times is not None
        assert (answer.times.first_token, answer.times.first_scheduled) == (record.token_times[0] - STEP_S, record.first_scheduled)
        assert answer.params is not None and answer.params.greedy and answer.params.known_output_len == 5


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_a_closed_loop_keeps_so_many_running(new_rig: NewRig, concurrency: int) -> None:
    """No more and, as long as there are some, no fewer; each is due when the one before it in its seat has ended, whatever `at` says."""
    rig = new_rig()
    records = drive(rig.engine, work(*(item(output=1 + n % 3, at=n * 100.0) for n in range(9))), concurrency=concurrency)
    assert all(record.sent == record.due for record in records)
    running = [sum(record.sent <= t < record.ended for record in records) for t in range(int(max(r.ended for r in records)))]
    assert max(running) == concurrency
    last_sent = max(record.sent for record in records)
    assert all(count == concurrency for t, count in enumerate(running) if t <= last_sent)


def test_a_conversation_waits_for_its_answers(new_rig: NewRig) -> None:
    """A later turn's prompt is all that was said before it and its own tokens; it is due after the pause, and not before its `at`."""
    turns = work(
        item(prompt=4, output=3),
        item(prompt=2, output=2, after=0, pause=1.5),
        item(prompt=1, output=1, after=1, at=20.0),
        item(prompt=5, output=1, at=1.0),
    )
    rig = new_rig()
    engine = Answered(rig)
    first, second, third, other = drive(rig.engine, turns)
    assert [record.num_prompt_tokens for record in (first, second, third)] == [4, 9, 12] == [turns.prompt_len(n) for n in range(3)]
    assert (first.ended, second.due, second.sent, third.due) == (3.0, 4.5, 4.5, 20.0)
    assert other.ended == 2.0
    said = (*turns.items[0].prompt, *first.token_ids, *turns.items[1].prompt)
    assert engine.answers["1"].prompt_token_ids == list(said)
    assert engine.answers["2"].prompt_token_ids == [*said, *second.token_ids, *turns.items[2].prompt]


def test_in_a_closed_loop_a_conversation_goes_on_before_another_begins(new_rig: NewRig) -> None:
    """With one seat, whole conversations come one after the other; a pause lets others in."""
    chats = work(item(), item(), item(after=0), item(after=1), item(after=2))
    records = drive(new_rig().engine, chats, concurrency=1)
    assert sorted(range(5), key=lambda n: records[n].sent) == [0, 2, 4, 1, 3]
    paused = work(item(), item(), item(after=0, pause=1.0))
    records = drive(new_rig().engine, paused, concurrency=1)
    assert sorted(range(3), key=lambda n: records[n].sent) == [0, 1, 2]


def test_refusals_are_records_and_end_their_conversation(new_rig: NewRig) -> None:
    """Nothing is raised, nothing is missing from the records, and others go on."""
    seen: list[int] = []
    records = drive(
        new_rig().engine,
        work(item(prompt=MAX_MODEL_LEN), item(after=0), item(after=1), item()),
        progress=lambda record: seen.append(record.index),
    )
    assert [record.finish_reason for record in records] == ["refused", "", "", "length"]
    assert "max_model_len" in records[0].error
    assert records[2].error == "not sent: item 0, which it goes on from, has no answer (refused)"
    assert [record.succeeded for record in records] == [False, False, False, True]
    assert sorted(seen) == [0, 1, 2, 3]


def test_a_step_that_fails_costs_its_requests(new_rig: NewRig) -> None:
    """They are records that say why; those that come later have their answers."""
    rig = new_rig(failures={1: FailurePoint.SUBMIT})
    first, second = drive(rig.engine, work(item(output=4), item(at=5.0)))
    assert (first.finish_reason, len(first.token_ids)) == ("error", 1) and "its step failed" in first.error
    assert second.finish_reason == "length"


def test_an_engine_that_keeps_failing_is_raised(new_rig: NewRig) -> None:
    """Or a broken engine would be measured as one that refuses much. What was asked until then is kept, as failed."""
    rig = new_rig(failures=dict.fromkeys(range(1, 20), FailurePoint.SUBMIT))
    items = [item(output=1), *(item(at=1.0 + n) for n in range(9)), item(after=4)]
    with pytest.raises(RunFailed, match="InjectedFailure: ") as caught:
        drive(rig.engine, work(*items))
    assert isinstance(caught.value.__cause__, InjectedFailure)
    records = caught.value.records
    assert [record.finish_reason for record in records] == ["length", *["error"] * 4, ""]
    assert records[4].error.startswith("the engine gave up: ") and records[5].error.startswith("not sent: item 4")
    assert not rig.engine.has_work


def test_an_engine_that_is_stuck_is_raised(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and what waits has failed."""
    rig = new_rig()

    def stuck() -> None:
        raise EngineStuckError("nothing planned")

    monkeypatch.setattr(rig.engine, "step", stuck)
    with pytest.raises(RunFailed, match="EngineStuckError: nothing planned") as caught:
        drive(rig.engine, work(item(), item(), item(at=9.0)))
    assert [(one.finish_reason, one.error) for one in caught.value.records] == [("error", "the engine gave up: nothing planned")] * 2
    assert not rig.engine.has_work


def test_requests_that_take_too_long(new_rig: NewRig) -> None:
    """They end with what they have."""
    (record,) = drive(new_rig().engine, work(item(output=9)), timeout_s=2.5)
    assert (record.finish_reason, record.succeeded, len(record.token_ids)) == ("timeout", False, 3)


def test_a_policy_that_waits_for_company(new_rig: NewRig) -> None:
    """Its waiting ends when the next item is due, and not later."""
    rig = new_rig(STATIC, window_s=5.0, batch_size=2)
    first, second = drive(rig.engine, work(item(), item(at=2.0)))
    assert first.first_scheduled == second.first_scheduled == 2.0
    (alone,) = drive(rig.engine, work(item()))
    assert alone.first_scheduled == 5.0


def test_preemptions_and_cached_tokens_are_recorded(new_rig: NewRig) -> None:
    """As the engine counts them."""
    rig = new_rig(slots=32)
    records = drive(rig.engine, work(*(item(prompt=8, output=16) for _ in range(3))))
    assert sum(record.num_preemptions for record in records) == sum(report.num_preempted for report in rig.reports) > 0


@pytest.mark.parametrize("idle", [False, True])
def test_ctrl_c_keeps_what_is_done(new_rig: NewRig, idle: bool) -> None:
    """In a step and asleep: answered ones are whole, running ones aborted, the others absent; the engine is empty afterwards."""
    rig = new_rig()

    class Interrupting:
        def octavo_step_finished(self, report: StepReport) -> None:
            if report.step == 3 and not idle:
                os.kill(os.getpid(), signal.SIGINT)

    rig.engine.observers.add(Interrupting())
    if idle:
        rig.clock.sleep_until = lambda when: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(RunInterrupted, match=rf"interrupted: 1 of {1 if idle else 2} requests sent have their answer") as caught:
        drive(rig.engine, work(item(output=2), *([] if idle else [item(output=9)]), item(at=50.0)))
    records = caught.value.records
    assert [record.finish_reason for record in records] == (["length"] if idle else ["length", "abort"])
    if not idle:
        assert len(records[1].token_ids) == 4 and records[1].error == "interrupted by Ctrl-C"
    assert not rig.engine.has_work and rig.kv.usage().filled == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_keeps_what_is_done(new_rig: NewRig) -> None:
    """It ends the step at once; the engine is left as it is."""
    rig = new_rig()

    class Impatient:
        def octavo_step_finished(self, report: StepReport) -> None:
            for _ in range(2 if report.step == 3 else 0):
                os.kill(os.getpid(), signal.SIGINT)

    rig.engine.observers.add(Impatient())
    with pytest.raises(RunInterrupted) as caught:
        drive(rig.engine, work(item(output=2), item(output=9), item(at=50.0)))
    assert [(one.finish_reason, one.cut_short) for one in caught.value.records] == [("length", False), ("abort", True)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_classes(new_rig: NewRig) -> None:
    """One that the scheduler knows has its limits; another runs as default. Both are in the records."""
    rig = new_rig(classes={"batch": {"max_running": 1}})
    engine = Answered(rig)
    records = drive(rig.engine, work(item(class_name="batch"), item(class_name="batch"), item(class_name="chat")))
    assert [record.class_name for record in records] == ["batch", "batch", "chat"]
    assert [engine.answers[str(index)].class_name for index in range(3)] == ["batch", "batch", "default"]
    assert [record.sent for record in records] == [0.0] * 3 and [record.ended for record in records] == [2.0, 4.0, 2.0]


def test_an_engine_with_other_work_is_refused(new_rig: NewRig) -> None:
    """Its other requests would be measured as this run's."""
    rig = new_rig()
    rig.add()
    with pytest.raises(EngineError, match="the engine has work of its own"):
        drive(rig.engine, work(item()))


def test_no_seats_is_a_mistake(new_rig: NewRig) -> None:
    """Nothing would ever be sent."""
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        drive(new_rig().engine, work(item()), concurrency=0)

"""The engine in a thread of its own: order, sleep, failures, end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.core.clock import MonotonicClock
from octavo.core.engine import Engine
from octavo.core.engine_loop import MOST_FAILURES, EngineLoop
from octavo.core.errors import ConfigError, EngineError, EngineStuckError
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.fake_model import VOCAB_SIZE
from octavo.core.testing.fake_runner import FailurePoint, FakeRunner
from tests.core.conftest import make_rig

BOUND = 10.0


class Listener:
    """What the loop delivered, and a way to wait for it."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.deaths: list[BaseException] = []
        self._changed = threading.Condition()

    def deliver(self, outputs: list[RequestOutput]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()

    def died(self, error: BaseException) -> None:
        with self._changed:
            self.deaths.append(error)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[Listener], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), BOUND), f"not within {BOUND} s: {self.outputs}, {self.deaths}"

    def ended(self, count: int) -> None:
        self.wait_for(lambda self: sum(output.finished for output in self.outputs) >= count)


Start = Callable[..., tuple[EngineLoop, Listener]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Make a loop around a fake engine; it is stopped after the test, and must stop."""
    loops: list[EngineLoop] = []

    def make(*, failures: dict[int, FailurePoint] | None = None, **options: Any) -> tuple[EngineLoop, Listener]:
        rig = make_rig(**options)
        engine = Engine(
            scheduler=rig.scheduler,
            kv=rig.kv,
            runner=FakeRunner(rig.kv, failures=failures),
            max_model_len=64,
            vocab_size=VOCAB_SIZE,
            clock=MonotonicClock(),
            debug=True,
        )
        listener = Listener()
        loop = EngineLoop(lambda: engine, deliver=listener.deliver, died=listener.died)
        loops.append(loop)
        loop.start()
        return loop, listener

    yield make
    for loop in loops:
        assert loop.stop(BOUND)


def add(loop: EngineLoop, *, max_tokens: int = 4, **settings: Any) -> None:
    loop.post(lambda engine: engine.add_request([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True), **settings) and None)


def test_requests_are_answered_in_their_own_thread(start: Start) -> None:
    """Actions run in the loop's thread, in the order in which they were posted."""
    loop, listener = start()
    seen: list[tuple[int, str]] = []
    for number in range(5):
        loop.post(lambda engine, number=number: seen.append((number, threading.current_thread().name)))  # type: ignore[misc]
        add(loop)
    listener.ended(5)
    assert seen == [(number, "octavo-engine") for number in range(5)]


def test_it_sleeps_while_there_is_nothing_to_do(start: Start) -> None:
    """An idle loop takes no processor time, before and after work."""
    loop, listener = start()
    add(loop)
    listener.ended(1)
    time.sleep(0.05)
    begun = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun < 0.1


def test_it_wakes_when_the_policy_asked_to(start: Start) -> None:
    """A static batch that waits for company starts after its window, with nobody posting anything."""
    from octavo.plugins.schedulers.static import STATIC

    loop, listener = start(scheduler=STATIC, window_s=0.1)
    add(loop)
    listener.ended(1)
    assert loop.engine.wait_until is None


def test_a_failed_step_costs_its_requests_and_no_others(start: Start) -> None:
    """The requests of the failed step end with an error that says why; the next one is answered."""
    loop, listener = start(failures={1: FailurePoint.AFTER_TRANSFERS})
    add(loop, request_id="hit")
    listener.ended(1)
    assert listener.outputs[-1].outputs[0].finish_reason == "error"
    assert "step 1 fails" in (listener.outputs[-1].outputs[0].error or "")
    add(loop, request_id="later")
    listener.ended(2)
    assert listener.outputs[-1].outputs[0].finish_reason == "length"
    assert loop.alive and loop.num_failed_steps == 1


def test_steps_that_fail_one_after_another_kill_it(start: Start) -> None:
    """More than MOST_FAILURES in a row: it dies once, says why, and takes nothing any more."""
    loop, listener = start(failures=dict.fromkeys(range(100), FailurePoint.SUBMIT))
    for _ in range(MOST_FAILURES + 1):
        add(loop)
        time.sleep(0.02)
    for _ in range(MOST_FAILURES):
        if loop.alive:
            try:
                add(loop)
            except EngineError:
                break
            time.sleep(0.02)
    listener.wait_for(lambda self: bool(self.deaths))
    assert len(listener.deaths) == 1
    assert not loop.alive
    with pytest.raises(EngineError, match=r"^the engine has stopped: step \d+ fails in submit$"):
        loop.post(lambda engine: None)


def test_an_engine_that_can_plan_nothing_dies_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineStuckError is nobody's request's fault."""
    loop, listener = start()

    def stuck(engine: Engine) -> None:
        monkeypatch.setattr(engine, "_advance", _raise)

    def _raise(started: float) -> None:
        raise EngineStuckError("planned nothing")

    loop.post(stuck)
    add(loop)
    listener.wait_for(lambda self: bool(self.deaths))
    assert isinstance(loop.failure, EngineStuckError)


def test_a_step_that_hangs_can_be_told(start: Start) -> None:
    """`stalled_for` grows while a step runs and is 0 between steps; `stop` gives up after its bound."""
    loop, listener = start()
    release = threading.Event()
    began = threading.Event()

    def hang(engine: Engine) -> None:
        submit = engine.runner.submit

        def waiting(plan: Any) -> Any:
            began.set()
            release.wait(BOUND)
            return submit(plan)

        engine.runner.submit = waiting  # type: ignore[method-assign]

    loop.post(hang)
    assert loop.stalled_for() == 0.0
    add(loop, max_tokens=1)
    assert began.wait(BOUND)
    time.sleep(0.05)
    assert loop.stalled_for() >= 0.05
    release.set()
    listener.ended(1)
    assert loop.stop(BOUND)
    assert loop.stalled_for() == 0.0


def test_stop_gives_up_on_a_step_that_hangs(start: Start) -> None:
    """It returns False after its bound instead of waiting for ever."""
    loop, _ = start()
    release, began = threading.Event(), threading.Event()

    def hang(engine: Engine) -> None:
        began.set()
        release.wait(BOUND)

    loop.post(hang)
    assert began.wait(BOUND)
    assert loop.stop(0.05) is False
    release.set()


def test_the_engine_is_built_in_its_thread() -> None:
    """One thread does all of an engine's tensor work: OpenMP makes a team of workers for each thread that computes."""
    threads: list[str] = []

    def build() -> Engine:
        threads.append(threading.current_thread().name)
        raise ConfigError("no such model")

    loop = EngineLoop(build, deliver=lambda _: None, died=lambda _: None)
    with pytest.raises(ConfigError, match="no such model"):
        loop.start()
    assert threads == ["octavo-engine"]
    assert not loop.alive
    with pytest.raises(EngineError, match="no such model"):
        loop.post(lambda _: None)
    assert loop.stop(BOUND)

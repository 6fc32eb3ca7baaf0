"""A turn: one thread at a time, and an interrupt waits until it is over."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from octavo.core.errors import EngineError
from octavo.core.turns import Turns


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.sigtimedwait([], 0)  # let Python run its handler


@pytest.fixture(autouse=True)
def default_handler() -> None:
    """As in a program that handles no signals itself."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_waits_for_the_end_of_the_turn() -> None:
    """What was begun is finished, then KeyboardInterrupt is raised, and the handler is the old one."""
    done = []
    with pytest.raises(KeyboardInterrupt), Turns().take():
        interrupt()
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_heard_at_once() -> None:
    """Somebody means it: a turn that hangs can be left."""
    done = []
    with pytest.raises(KeyboardInterrupt), Turns().take():
        interrupt()
        interrupt()
        done.append("never")
    assert not done


def test_one_thread_at_a_time() -> None:
    """The other one is told so, and nothing waits."""
    turns, told = Turns(), list[str]()

    def other() -> None:
        try:
            with turns.take():
                told.append("in")
        except EngineError as error:
            told.append(str(error))

    with turns.take():
        assert not turns.free()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=10)
    assert told == ["this engine is in use by another thread, or by whoever is just being told of a step: one at a time"]
    assert turns.free()


def test_other_handlers_are_left_alone() -> None:
    """A server that handles SIGINT itself keeps its handler, inside a turn too."""
    seen = []
    old = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Turns().take():
            interrupt()
            assert seen
    finally:
        signal.signal(signal.SIGINT, old)

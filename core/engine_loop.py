"""`EngineLoop`: an engine in a thread of its own, which steps while there is work and sleeps while there is none.

Others never touch the engine: they post actions, which run between two steps, in order. What comes out is handed to `deliver` once a
step. When the engine can't go on, `died` is told, once, and nothing runs any more.

The engine is built in that thread too. OpenMP keeps a team of workers for every thread that computes; with two teams there are more
workers than cores, their waiting turns from spinning into sleeping, and each operation pays two wake-ups (a sixth of a step's time).
Must not know: asyncio, HTTP, tensors.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from octavo.core.engine import Engine
from octavo.core.errors import EngineError, EngineStuckError
from octavo.core.outputs import RequestOutput

logger = logging.getLogger("octavo")

Action = Callable[[Engine], None]
MOST_FAILURES = 3  # steps in a row; more, and it is not the requests' fault


class EngineLoop:
    """Start it once, stop it once. `build`, `deliver` and `died` are called in its thread; the last two must not raise."""

    engine: Engine

    def __init__(
        self, build: Callable[[], Engine], *, deliver: Callable[[list[RequestOutput]], None], died: Callable[[BaseException], None]
    ) -> None:
        self.failure: BaseException | None = None  # why it died
        self.step_began: float | None = None  # on the engine's clock; None: no step runs
        self.num_failed_steps = 0
        self._build = build
        self._built: Future[None] = Future()
        self._deliver = deliver
        self._died = died
        self._inbox: deque[Action] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._failures = 0  # in a row
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    def start(self) -> None:
        """Have the engine built, and begin to step. Raises what building raised."""
        self._thread.start()
        self._built.result()

    @property
    def alive(self) -> bool:
        """It runs, and takes actions."""
        return self._thread.is_alive() and self.failure is None and not self._stopping

    @property
    def ended(self) -> bool:
        """It ran, and does not any more: nobody touches the engine."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def post(self, action: Action) -> None:
        """Run this between two steps. Raises EngineError if the loop has ended."""
        with self._changed:
            if self._stopping or self.failure is not None:
                raise EngineError(f"the engine has stopped{f': {self.failure}' if self.failure else ''}")
            self._inbox.append(action)
            self._changed.notify()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the step that runs now; what is unfinished stays so. False: it did not end in time (a step hangs)."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stalled_for(self) -> float:
        """Seconds that the step which runs now has taken; 0 between steps."""
        began = self.step_began
        return 0.0 if began is None else self.engine.clock.now() - began

    # --------------------------------------------------------------- its thread

    def _run(self) -> None:
        try:
            self.engine = self._build()
        except BaseException as error:
            self.failure = error
            self._built.set_exception(error)
            return
        self._built.set_result(None)
        try:
            while self._wait():
                for action in self._take():
                    self._act(action)
                if self.engine.has_work:
                    outputs = self._step()
                    if outputs:
                        self._deliver(outputs)
        except BaseException as error:
            logger.critical("the engine cannot go on: %s", error, exc_info=error)
            with self._changed:
                self.failure = error
                self._inbox.clear()
            self._died(error)

    def _act(self, action: Action) -> None:
        """One that fails is its poster's business: whether the engine can go on, its next steps will show."""
        try:
            action(self.engine)
        except Exception:
            logger.exception("something asked of the engine failed")

    def _wait(self) -> bool:
        """Sleep until there is something to do; False: stop."""
        engine = self.engine
        with self._changed:
            while not self._stopping and not self._inbox:
                if not engine.has_work:
                    self._changed.wait()
                elif engine.wait_until is not None and (pause := engine.wait_until - engine.clock.now()) > 0:
                    self._changed.wait(pause)
                else:
                    break
            return not self._stopping

    def _take(self) -> list[Action]:
        with self._changed:
            actions = list(self._inbox)
            self._inbox.clear()
        return actions

    def _step(self) -> list[RequestOutput]:
        """A step that fails costs its requests; several in a row, or one that shows that nothing can be planned, the engine."""
        self.step_began = self.engine.clock.now()
        try:
            outputs = self.engine.step()
            self._failures = 0
            return outputs
        except Exception as error:
            self._failures += 1
            self.num_failed_steps += 1
            if isinstance(error, EngineStuckError) or self._failures > MOST_FAILURES:
                raise
            logger.exception("a step failed; its requests are ended")
            self.engine.fail_undone(error)
            return self.engine.answers.drain()
        finally:
            self.step_began = None

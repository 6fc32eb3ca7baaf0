"""From the first request to the last: signals, draining, a dead or hanging engine, and the exit status that says which.

0: ended as asked. 1: the engine died or a step hung. 128 + signal: a second signal, at once.
Must not know: routes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from octavo.core.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.connections import BoundedProtocol, close_overdue
from octavo.server.served import Served

logger = logging.getLogger("octavo.server")

LINGER_S = 2.0  # after the engine's death: clients hear of it, and a probe can read the reason
POLL_S = 0.05


class Lifecycle:
    """One run of a server. Belongs to its event loop."""

    def __init__(self, here: Served) -> None:
        self._here = here
        self._server = _Server(self, here)
        self._signals = 0
        self._exit_status = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> int:
        """Serve until the end; returns the exit status."""
        here = self._here
        self._loop = asyncio.get_running_loop()
        here.llm.on_death = self._engine_died
        self._spawn(self._watch_steps())
        self._spawn(self._watch_connections())
        try:
            await self._server.serve([listener])
        finally:
            for task in self._tasks:
                task.cancel()
            if not here.llm.engine_loop.stalled_for():
                await here.llm.close()
        return self._exit_status

    # ------------------------------------------------------------------- signals

    def signalled(self, number: int) -> None:
        """From a signal handler: drain at the first, leave at the second."""
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._drain()))

    async def _drain(self) -> None:
        """Take nothing new, let what runs finish or time out, then end."""
        here, patience = self._here, self._here.settings.drain_timeout_s
        if here.status == "ready":
            here.status, here.reason = "draining", "shutting down"
        logger.info("shutting down: %d requests may finish within %g s", here.num_active, patience)
        await self._until_answered(patience)
        if here.num_active:
            logger.warning("%d requests did not finish in time and are ended", here.num_active)
            await here.llm.abort_all()
            await self._until_answered(LINGER_S)
        if here.num_active:  # a step hangs, or a client does not read
            here.llm.fail_all("it was shut down, and its step did not end")
            await self._until_answered(LINGER_S)
        self._server.should_exit = True

    async def _until_answered(self, limit_s: float) -> None:
        end = asyncio.get_running_loop().time() + limit_s
        while self._here.num_active and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(POLL_S)

    # --------------------------------------------------------------------- death

    def _engine_died(self, error: BaseException) -> None:
        here = self._here
        here.status, here.reason = "dead", str(error) or type(error).__name__
        logger.critical("the engine has stopped: %s", here.reason)
        here.flight.write_down("the engine has stopped")
        here.access_log.flush()
        if here.settings.on_death == "exit":
            self._exit_status = 1
            self._spawn(self._leave())

    async def _leave(self) -> None:
        await asyncio.sleep(LINGER_S)
        self._server.should_exit = True

    async def _watch_steps(self) -> None:
        """A step that takes longer than `step_timeout_s` will not come back: tell everybody and leave."""
        here, limit = self._here, self._here.settings.step_timeout_s
        while limit is not None:
            await asyncio.sleep(min(1.0, limit / 4))
            if here.status != "dead" and here.llm.engine_loop.stalled_for() > limit:
                here.status, here.reason = "dead", f"a step has taken more than step_timeout_s = {limit:g} s"
                logger.critical("%s", here.reason)
                here.flight.write_down(here.reason)
                here.llm.fail_all(here.reason)
                await asyncio.sleep(LINGER_S)
                leave(1)  # the engine's thread hangs: nothing can end it

    async def _watch_connections(self) -> None:
        """Clients that neither send nor read on are not waited for without end."""
        limit, loop = self._here.settings.client_timeout_s, asyncio.get_running_loop()
        while limit is not None:
            await asyncio.sleep(min(1.0, limit / 4))
            if closed := close_overdue(self._server.server_state.connections, now=loop.time(), limit_s=limit):
                logger.warning("%d connections were closed: their clients kept the server waiting for %g s", closed, limit)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Server(uvicorn.Server):
    """uvicorn, with its signals handed over."""

    def __init__(self, lifecycle: Lifecycle, here: Served) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(here),
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=5,
                server_header=False,
            )
        )
        self._lifecycle = lifecycle

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._lifecycle.signalled(sig)


def leave(status: int) -> NoReturn:
    """End the process now, without Python's own way out: that aborts it where another thread is inside native code."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, full, or never there
            stream.flush()
    os._exit(status)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """While a model is loaded SIGINT and SIGTERM end the process at once, with 128 + the signal: nobody waits for an answer yet.

    That a handler is set at all is what lets the first process of a container be ended.
    """
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    before = {number: signal.signal(number, lambda number, frame: leave(128 + number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model is loaded: a port in use is told at once. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host}, port {port}: {error}; choose another with --host and --port") from error
    return listener

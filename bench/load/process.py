"""`octavo serve` as a process of its own, for benchmarks and soaks: started, waited for, ended.

Must not know: what is asked of it.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.bench.load.http1 import Answer, connect, get

WAIT_S = 30.0  # for a connection, and for an answer to a GET


class ServerProcess:
    """A server at a free port. Use it in a `with` block; leaving it ends the process. Raises RuntimeError if it does not come up."""

    def __init__(self, arguments: Sequence[str], *, start_timeout_s: float = 300.0) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL)
        self.url = self._wait_until_it_serves(start_timeout_s)

    def _wait_until_it_serves(self, timeout_s: float) -> str:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(r"serving .* at (http://\S+)/v1", self.log):
                return found.group(1)
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"the server did not come up (exit status {self.process.returncode}):\n{self.log}")

    @property
    def log(self) -> str:
        """What it has written so far."""
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text(encoding="utf-8", errors="replace")

    def end(self, timeout_s: float = 60.0) -> int:
        """Ask it to end, as an init system does; returns its exit status. Raises subprocess.TimeoutExpired."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """At once."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self._log.close()


async def read(url: str, path: str) -> Answer:
    """GET, on a connection of its own. Raises OSError, BrokenAnswer."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = await connect(host, int(port), timeout_s=WAIT_S)
    try:
        return await asyncio.wait_for(connection.ask(get(path, host=host)), WAIT_S)
    finally:
        await connection.closed()

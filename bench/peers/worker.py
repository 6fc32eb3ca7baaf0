"""`Worker`: an engine in a process of its own, as its parent sees it. Every wait has a bound; what a process says when it fails is kept.

Must not know: which engine it is, what is asked.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

WORKERS = Path(__file__).absolute().parent / "workers"
BOOT = """
import importlib, sys, types
package = sys.modules["workers"] = types.ModuleType("workers")
name, *package.__path__ = sys.argv[1:]
importlib.import_module("workers.loop").serve(importlib.import_module(f"workers.{name}").ENGINE)
"""
"""Makes a package of the folders, without putting on the peer's path what lies beside them."""

START_WAIT_S = 900.0  # vLLM compiles for a minute or two
RUN_WAIT_S = 600.0
END_WAIT_S = 10.0

SETTINGS = ("OCTAVO_", "OMP_", "GOMP_", "KMP_", "VLLM_", "PYTHON")
"""Variables that begin so set up an engine, its threads or its interpreter: what the user has of them is not for the peers."""
KEPT = ("OCTAVO_HOME",)  # of these: where the cache is


class PeerError(RuntimeError):
    """An engine does not start, failed, or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An engine, where it is installed, and what it is loaded with. Paths are absolute: it runs in another folder."""

    name: str
    python: Path
    module: str  # of `workers`
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    warmups: int = 1  # turns of each task that do not count; 0: something small instead, before the first turn
    run_wait_s: float = RUN_WAIT_S  # for an answer
    folder: Path = WORKERS

    @property
    def command(self) -> Sequence[str]:
        """How it is started."""
        return [str(self.python), "-c", BOOT, self.module, str(self.folder), str(WORKERS)]


def environment(own: Mapping[str, str], *, parent: Mapping[str, str] | None = None) -> dict[str, str]:
    """`own` over the variables of the parent (default: this process) that are nobody's SETTINGS."""
    known = os.environ if parent is None else parent
    return {name: text for name, text in known.items() if name in KEPT or not name.startswith(SETTINGS)} | dict(own)


class Worker:
    """Started at once, in an empty folder; `load` it, `ask` it, `close` it. What it prints goes to the file `log`."""

    def __init__(self, contender: Contender, log: Path) -> None:
        self.contender = contender
        self._log = log
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-peer-")
        self._begun = time.perf_counter()
        try:
            with log.open("w", encoding="utf-8") as file:
                self._process = subprocess.Popen(
                    contender.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    cwd=self._folder.name,
                    env=environment(contender.environ),
                )
        except OSError as error:
            self._folder.cleanup()
            raise PeerError(f"{contender.python} does not run: {error.strerror}") from error
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def load(self) -> dict[str, Any]:
        """Its facts. Raises PeerError."""
        question = {"do": "load", "model": str(self.contender.model), "options": dict(self.contender.options)}
        facts: dict[str, Any] = self._ask(question, START_WAIT_S)["facts"]
        return facts

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """`seconds` and `token_ids`, as the worker took them. Raises PeerError."""
        return self._ask({"do": "generate", "prompts": prompts, "lengths": lengths}, self.contender.run_wait_s)

    def ask(self, do: str) -> dict[str, Any]:
        """`forget` or `memory`: see `workers/loop.py`. Raises PeerError."""
        return self._ask({"do": do}, self.contender.run_wait_s)

    @property
    def age(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._begun

    def cpu_seconds(self) -> float:
        """That it and its children have used. 0 once it has ended."""
        total = 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    times = one.cpu_times()
                    total += times.user + times.system
        return total

    def close(self) -> None:
        """End it: by closing its input, and if that does not help, by force."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._ended()
        self._reader.join(END_WAIT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        with suppress(OSError):  # a child that the engine left behind may still write there
            self._folder.cleanup()

    def _ask(self, question: dict[str, Any], wait_s: float) -> dict[str, Any]:
        stdin = self._process.stdin
        try:
            if stdin is None:
                raise BrokenPipeError
            print(json.dumps(question), file=stdin, flush=True)
            line = self._lines.get(timeout=wait_s)
        except BrokenPipeError:
            line = ""
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"{self.contender.name} did not answer within {wait_s:.0f} s and was ended") from None
        if not line:
            raise PeerError(f"{self.contender.name} ended with status {self._ended()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.contender.name}: {answer['error']}")
        return answer

    def _ended(self) -> int:
        """Its exit status; if it does not end by itself, it is ended by force."""
        try:
            return self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _last_words(self) -> str:
        """The last line that it printed, which in Python names the error; more lie in the log."""
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _read(self) -> None:
        out = self._process.stdout
        if out is not None:
            for line in out:
                self._lines.put(line)
        self._lines.put("")

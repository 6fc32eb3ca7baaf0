"""From the start of a process to its first token, and what that time is spent on, by the lines that the engine says of itself.

Must not know: engines; a process of `octavo generate` is looked at from outside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

SAID = {"model": "model ", "weights": "weights: ", "stack": "stack: "}
"""What the rest of a line says that begins so."""
STAGES = {"model found": SAID["model"], "weights loaded": SAID["weights"], "engine ready": "Maximum concurrency "}
"""What the first line that begins so says to be over."""

FIRST_TOKEN = "first token"


@dataclass(slots=True)
class Start:
    """One process. Seconds from its start, by stage; a stage that was not seen is missing."""

    stages: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)  # of its model, weights (with their type and device) and stack

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.stages[FIRST_TOKEN]

    def identity(self) -> dict[str, Any]:
        """What was started, as far as it said so itself, when, with which versions, and on what machine."""
        from octavo.core.description import versions  # here: to tell what the command takes needs none of it
        from octavo.core.processor import cpu_name

        date = datetime.now(UTC).isoformat(timespec="seconds")
        return {"date": date, "versions": versions(), **self.said, "cpu": cpu_name(), "cores": os.cpu_count() or 0}


class StartupError(RuntimeError):
    """The process made no token."""


def start_once(arguments: Sequence[str], *, timeout_s: float = 600.0, environ: Mapping[str, str] | None = None) -> Start:
    """Start `octavo generate` with these arguments for one token, by default in this process's environment.

    Raises StartupError with what it said if it makes none in time.
    """
    command = [sys.executable, "-m", "octavo", "generate", "Hello", "--max-tokens", "1", *arguments]
    begun = time.perf_counter()
    start, said = Start(), list[str]()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    out, err = process.stdout, process.stderr
    if out is None or err is None:
        raise StartupError("no pipes to the process")

    def listen() -> None:
        for line in err:
            now = time.perf_counter() - begun
            said.append(line)
            for stage, beginning in STAGES.items():
                if line.startswith(beginning):
                    start.stages.setdefault(stage, now)
            for what, beginning in SAID.items():
                if line.startswith(beginning):
                    start.said.setdefault(what, line.removeprefix(beginning).strip())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    try:
        if out.read(1):
            start.stages[FIRST_TOKEN] = time.perf_counter() - begun
        out.read()
        status = process.wait()
        listener.join(10)
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        out.close()
        err.close()
    if status != 0 or FIRST_TOKEN not in start.stages:
        raise StartupError(f"the process ended with status {status} and made no token:\n{''.join(said[-20:])}")
    return start

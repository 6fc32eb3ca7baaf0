"""`FlightRecorder`: the last steps in numbers, for whoever asks why one ran out of memory, hung or failed.

Must not know: texts, token ids, HTTP.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from octavo.core.engine import Engine
from octavo.core.outputs import StepReport
from octavo.core.plan import BatchPlan

logger = logging.getLogger("octavo.server")

PAUSE_S = 60.0  # between two records written because of failing steps: these come in rows
IN_LOG = 5  # steps
ATTEMPTS = 5


class FlightRecorder:
    """An observer that keeps the newest `num_steps` reports."""

    def __init__(self, engine: Engine, *, num_steps: int, directory: str | None) -> None:
        self._engine = engine
        self._directory = directory
        self._reports: deque[StepReport] = deque(maxlen=num_steps)
        self._not_before = float("-inf")  # on the engine's clock
        self._num_written = 0

    def octavo_step_finished(self, report: StepReport) -> None:
        """Keep it; if it was undone, write down what led to it."""
        self._reports.append(replace(report, events=()) if report.events else report)
        if report.error and report.time >= self._not_before:
            self._not_before = report.time + PAUSE_S
            self.write_down(f"a step failed: {report.error}")

    def record(self, reason: str = "") -> dict[str, Any]:
        """Everything, as JSON has it. For any thread."""
        return {
            "reason": reason,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "engine_time": self._engine.clock.now(),
            "in_flight": [_plan(plan) for plan in _settled(lambda: self._engine.plans_in_flight)],
            "steps": [_step(report) for report in _settled(lambda: list(self._reports))],
        }

    def write_down(self, reason: str) -> None:
        """To the log in short, and to a file if there is a directory for it. Never raises for a disk's sake."""
        newest = _settled(lambda: list(self._reports))[-IN_LOG:]
        lines = [f"  step {r.step}: {_short(r)}" for r in newest]
        logger.error("%s; the last steps:\n%s", reason, "\n".join(lines) or "  none")
        if self._directory is None:
            return
        self._num_written += 1
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        file = Path(self._directory) / f"flight-{stamp}-{os.getpid()}-{self._num_written}.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self.record(reason)))
        except OSError as error:
            logger.error("the last steps could not be written to %s: %s", file, error)
        else:
            logger.error("the last steps are in %s", file)


def _settled(look: Callable[[], Any]) -> Any:
    """What another thread may be changing: a list that changed while it was copied is copied again."""
    for _ in range(ATTEMPTS):
        try:
            return look()
        except RuntimeError:
            continue
    return []


def _short(report: StepReport) -> str:
    usage = report.usage
    kv = f"KV {usage.filled} filled, {usage.held} held, {usage.cached} cached, {usage.free} free"
    took = f"{1000 * sum(report.seconds.values()):.1f} ms"
    text = f"{report.num_rows} rows, {report.num_tokens} tokens, {report.num_running} running, {report.num_waiting} waiting, {kv}, {took}"
    return f"{text}, undone: {report.error}" if report.error else text


def _step(report: StepReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "time": report.time,
        "running": report.num_running,
        "waiting": report.num_waiting,
        "rows": [list(row) for row in zip(report.starts, report.lengths, strict=True)],
        "tokens": report.num_tokens,
        "sampled": report.num_sampled,
        "idle_rows": report.idle_rows,
        "preempted": report.num_preempted,
        "failed": report.num_failed,
        "transfers": report.transfers,
        "kv": asdict(report.usage),
        "seconds": report.seconds,
        "error": report.error,
    }


def _plan(plan: BatchPlan) -> dict[str, Any]:
    return {
        "rows": [[chunk.start, chunk.length] for chunk in plan.chunks],
        "tokens": plan.num_tokens,
        "preempted": len(plan.preempted),
        "transfers": len(plan.transfers),
    }

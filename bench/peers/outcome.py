"""`Outcome`: all that a run measured, as a JSON file that its page can be written from again.

Must not know: engines, how it is printed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.whole_files import write_whole

SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Seconds are of turns that count, in order: turn i of two engines stood next to each other."""

    settings: dict[str, Any]  # rows, rounds, threads, seed, scale
    identity: dict[str, Any]  # machine, model, date
    tokens: dict[str, int] = field(default_factory=dict)  # output tokens by timing
    answers: dict[str, int] = field(default_factory=dict)  # how many, by timing
    digests: dict[str, str] = field(default_factory=dict)  # of the works by task
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each engine says of itself
    problems: dict[str, str] = field(default_factory=dict)  # why an engine has no figures, or none any more
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by timing, by engine
    alike: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)  # by timing, by engine: see `compare_tokens`
    starts: dict[str, list[float]] = field(default_factory=dict)  # process start to first token, by engine
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)  # bytes by engine, None where unknown: see `workers/loop.py`
    idle: dict[str, float] = field(default_factory=dict)  # most of a core that an engine used while another one worked
    others: list[float] = field(default_factory=list)  # of each turn: cores used by anything but the engine at work
    minutes: float = 0.0
    finished: bool = False

    def save(self, path: Path) -> None:
        """As JSON. Raises OSError."""
        write_whole(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1))


def compare_tokens(ours: list[list[int]], theirs: list[list[int]]) -> tuple[float, float]:
    """Share of the answers whose first token is the same, and the mean share of an answer before the first difference."""
    first, before = 0, 0.0
    for one, other in zip(ours, theirs, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        first += same > 0
        before += same / len(one)
    return first / len(ours), before / len(ours)

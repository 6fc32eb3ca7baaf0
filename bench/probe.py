"""A short look at how fast a target is, and from it how long a run will take. An estimate, to be said before it starts.

Must not know: whether the target is an engine or a server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from octavo.bench.records import RequestRecord
from octavo.bench.work import Item, Work

Send = Callable[[Work], list[RequestRecord]]
"""Runs a work, all at once."""

ROWS = 8  # requests at once in the second look
OUTPUT = 8  # tokens of each
LONGEST = 512  # prompt tokens of each, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast prompts are computed and steps follow each other. NaN where no request was answered."""

    prompt_rate: float  # tokens a second
    step_alone: float  # seconds between tokens of one request
    step_together: float  # the same of `rows` at once
    rows: int

    def busy(self, work: Work, *, seats: int) -> float:
        """Seconds that the target needs for a work if it never waits, with so many requests at once."""
        rows = max(1, min(seats, len(work.items)))
        row = max(0.0, (self.step_together - self.step_alone) / (self.rows - 1)) if self.rows > 1 else 0.0
        step = self.step_alone + row * (rows - 1)
        outputs = [item.output_len for item in work.items]
        steps = max(sum(outputs) / rows, max(outputs))
        return sum(len(item.prompt) for item in work.items) / self.prompt_rate + steps * step


def probe(send: Send, work: Work, *, seats: int) -> Pace:
    """Send one request, and then a few at once, as many as find a seat: like those of the work, but short, and backwards.

    So nothing of the work is cached by it. What finds no seat would wait, and the look be one at a queue.
    """
    rows = max(1, min(ROWS, seats, len(work.items)))
    items = sorted(work.items, key=lambda item: len(item.prompt))
    middle = [items[(2 * n + 1) * len(items) // (2 * rows)] for n in range(rows)]
    alike = [Item(prompt=item.prompt[-LONGEST:][::-1], output_len=OUTPUT) for item in middle]
    send(replace(work, items=alike[:1]))  # threads start, memory is touched
    alone, together = send(replace(work, items=_turned(alike[:1], 1))), send(replace(work, items=_turned(alike, 2)))
    firsts = [record.token_times[0] - record.sent for record in together if record.succeeded]
    tokens = sum(record.num_prompt_tokens - record.num_cached_tokens for record in together if record.succeeded)
    return Pace(
        prompt_rate=tokens / max(firsts) if firsts and max(firsts) > 0 else math.nan,
        step_alone=_step(alone),
        step_together=_step(together),
        rows=len(together),
    )


def _turned(items: list[Item], by: int) -> list[Item]:
    """The same lengths with prompts that begin otherwise: no look finds what the one before it left in a prefix cache."""
    return [replace(item, prompt=(*item.prompt[by:], *item.prompt[:by])) for item in items]


def _step(records: list[RequestRecord]) -> float:
    steps = [
        (record.token_times[-1] - record.token_times[0]) / (record.num_output_tokens - 1)
        for record in records
        if record.succeeded and record.num_output_tokens > 1
    ]
    return fmean(steps) if steps else math.nan


def forecast(pace: Pace, work: Work, *, seats: int, open_loop: bool) -> str:
    """How long the run will take, in a sentence, and why."""
    busy = pace.busy(work, seats=seats)
    if math.isnan(busy):
        return "How long it will take is unknown: the requests of the probe were not answered"
    offered = max(item.at for item in work.items) if open_loop else 0.0
    tokens = f"{sum(len(item.prompt) for item in work.items)} input and {sum(item.output_len for item in work.items)} output tokens"
    steps = f"{pace.step_alone * 1000:.1f} ms a step for one request, {pace.step_together * 1000:.1f} ms for {pace.rows}"
    why = f"{tokens} need {duration(busy)} (probe: {pace.prompt_rate:.0f} prompt tokens a second, {steps})"
    arrivals = f"requests arrive for {duration(offered)}, " if offered else ""
    return f"This will take about {duration(max(busy, offered))}: {arrivals}{why}"


def duration(seconds: float) -> str:
    """For people: 12 s, 3 min 20 s, 2 h 5 min."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

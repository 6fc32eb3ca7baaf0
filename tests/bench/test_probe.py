"""How long a run will take, from a short look: against engines whose speed is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from octavo.bench.drive import drive
from octavo.bench.probe import Pace, duration, forecast, probe
from octavo.bench.records import RequestRecord
from octavo.bench.work import Item, Work
from octavo.core.testing.rig import Rig


def work(count: int, prompt: int = 6, output: int = 4, at: float = 0.0) -> Work:
    tokens = tuple(1 + n % 3 for n in range(prompt))
    return Work(name="test", items=[Item(prompt=tokens, output_len=output, at=at) for _ in range(count)])


def answered(work: Work) -> list[RequestRecord]:
    """A target that computes 100 prompt tokens a second and takes 0.1 s and 0.02 s a row for a step."""
    rows, wait = len(work.items), sum(len(item.prompt) for item in work.items) / 100
    step = 0.1 + 0.02 * rows
    return [
        RequestRecord(
            index=index,
            num_prompt_tokens=len(item.prompt),
            max_tokens=item.output_len,
            due=0.0,
            sent=0.0,
            ended=wait + step * (item.output_len - 1),
            token_times=[wait + step * n for n in range(item.output_len)],
            finish_reason="length",
        )
        for index, item in enumerate(work.items)
    ]


@pytest.mark.parametrize(("count", "seats"), [(1, 64), (5, 64), (64, 64), (640, 64), (640, 1)])
def test_the_forecast_of_a_known_target(count: int, seats: int) -> None:
    """Within a tenth of what it takes, whatever the batch."""
    asked = work(count, prompt=50, output=40)
    pace = probe(answered, asked)
    rows = min(count, seats)
    expected = count * 50 / 100 + count / rows * 40 * (0.1 + 0.02 * rows)
    assert pace.busy(asked, seats=seats) == pytest.approx(expected, rel=0.1 if count > 1 else 0.5)


def test_an_engine(new_rig: Callable[..., Rig]) -> None:
    """Steps that take a second, whatever is in them; nothing of the work itself is sent."""
    rig = new_rig()
    asked = work(40)
    pace = probe(lambda short: drive(rig.engine, short), asked)
    assert (pace.step_alone, pace.step_together, pace.rows) == (1.0, 1.0, 8)
    assert pace.busy(asked, seats=8) == pytest.approx(40 * 6 / pace.prompt_rate + 20)
    sent = {chunk.sequence.request.prompt for plan in rig.plans for chunk in plan.chunks}
    assert sent and asked.items[0].prompt not in sent


def test_what_is_said() -> None:
    """How long, why, and in an open loop how long requests arrive; the longer of both counts."""
    pace = Pace(prompt_rate=1000.0, step_alone=0.05, step_together=0.12, rows=8)
    said = forecast(pace, work(10, at=100.0), seats=10, open_loop=True)
    assert said.startswith(
        "This will take about 1 min 40 s: requests arrive for 1 min 40 s, 60 input and 40 output tokens need 1 s (probe: 1000"
    )
    assert forecast(pace, work(10, at=100.0), seats=10, open_loop=False).startswith("This will take about 1 s: 60 input")


def test_a_target_that_answers_nothing() -> None:
    """Then nothing is foretold."""
    pace = probe(lambda short: [], work(3))
    assert math.isnan(pace.prompt_rate)
    assert "is unknown" in forecast(pace, work(3), seats=1, open_loop=False)


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations(seconds: float, words: str) -> None:
    """For people."""
    assert duration(seconds) == words

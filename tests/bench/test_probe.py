"""How long a run will take, from a short look: against engines whose speed is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from octavo.bench.drive import drive, seats as seats_of
from octavo.bench.probe import Pace, duration, forecast, probe
from octavo.bench.records import RequestRecord
from octavo.bench.work import Item, Work
from octavo.core.descriptors import PoolShape
from octavo.core.testing.random_runs import MAX_MODEL_LEN
from octavo.core.testing.rig import Rig
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions


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
    pace = probe(answered, asked, seats=seats)
    rows = min(count, seats)
    expected = count * 50 / 100 + count / rows * 40 * (0.1 + 0.02 * rows)
    assert pace.busy(asked, seats=seats) == pytest.approx(expected, rel=0.1 if count > 1 else 0.5)


def test_an_engine(new_rig: Callable[..., Rig]) -> None:
    """Steps that take a second, whatever is in them; nothing of the work itself is sent."""
    rig = new_rig(max_num_seqs=8)
    asked = work(40)
    pace = probe(lambda short: drive(rig.engine, short), asked, seats=8)
    assert (pace.step_alone, pace.step_together, pace.rows) == (1.0, 1.0, 8)
    assert pace.busy(asked, seats=8) == pytest.approx(40 * 6 / pace.prompt_rate + 20)
    sent = {chunk.sequence.request.prompt for plan in rig.plans for chunk in plan.chunks}
    assert sent and asked.items[0].prompt not in sent


@pytest.mark.parametrize(("reservation", "slots", "room"), [("max", MAX_MODEL_LEN, 1), ("max", 3 * MAX_MODEL_LEN, 3), ("request", 40, 2)])
def test_an_engine_that_memory_limits(new_rig: Callable[..., Rig], reservation: str, slots: int, room: int) -> None:
    """Of 64 seats the pool fills a few: what is foretold is within a tenth of what it takes."""
    pool = PoolShape(num_slots=slots, num_host_slots=0, max_model_len=MAX_MODEL_LEN, max_num_seqs=64)
    rig = new_rig(kv=CONTIGUOUS.build(ContiguousOptions(reservation=reservation), pool), max_num_seqs=64)
    asked = work(20, output=12)
    assert seats_of(rig.engine, asked) == room
    pace = probe(lambda short: drive(rig.engine, short), asked, seats=room)
    assert pace.rows == room
    begun = rig.clock.now()
    drive(rig.engine, asked)
    assert pace.busy(asked, seats=room) == pytest.approx(rig.clock.now() - begun, rel=0.1)


def test_seats_of_a_paged_pool(new_rig: Callable[..., Rig]) -> None:
    """As many as it carries to their ends, in whole blocks, with the turns before; no more than the scheduler seats, and one at least."""
    assert seats_of(new_rig(slots=48, max_num_seqs=64).engine, work(20, prompt=6, output=12)) == 2  # 17 positions, 5 blocks of 4 each
    assert seats_of(new_rig(slots=512, max_num_seqs=5).engine, work(20)) == 5
    assert seats_of(new_rig(slots=512, max_num_seqs=5).engine, work(3)) == 3
    assert seats_of(new_rig(slots=8).engine, work(3, prompt=30, output=9)) == 1
    first = Item(prompt=(1,) * 6, output_len=4)
    talk = Work(name="talk", items=[first, Item(prompt=(1,) * 6, output_len=4, after=0)])
    assert [seats_of(new_rig(slots=slots, max_num_seqs=64).engine, talk) for slots in (28, 32)] == [1, 2]  # 9 and 19 positions


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
    pace = probe(lambda short: [], work(3), seats=1)
    assert math.isnan(pace.prompt_rate)
    assert "is unknown" in forecast(pace, work(3), seats=1, open_loop=False)


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations(seconds: float, words: str) -> None:
    """For people."""
    assert duration(seconds) == words

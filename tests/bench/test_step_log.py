"""A step's line says what ran, when, and what became of the pool before and after it."""

from __future__ import annotations

import pytest

from octavo.bench.step_log import StepLog
from octavo.core.sampling_params import SamplingParams
from tests.bench.pools import rig
from tests.matrix.stacks import build, stack_reports
from tests.models import tiny


def test_rows_tokens_and_pairs() -> None:
    """Prompts of 3 and 5 in one step: 3 + 5 tokens, as many slots read, 6 + 15 pairs of query and key; then two rows of one token."""
    made, log = rig("paged", slots=40), StepLog(0.0)
    made.add(3, 2)
    made.add(5, 2)
    with log.watching(made.engine):
        made.finish()
    first, second = log.lines
    assert (first.num_rows, first.num_tokens, first.num_context, first.num_pairs) == (2, 8, 8, 21)
    assert (second.num_rows, second.num_tokens, second.num_context, second.num_pairs) == (2, 2, 10, 10)
    assert (first.num_running, first.num_waiting, second.num_running) == (2, 0, 0)
    assert (first.num_written, second.num_written) == (8, 2)


def test_the_pool_before_and_after_a_step() -> None:
    """Blocks are taken before it runs and given back after it: one that begins and ends within a step is seen."""
    made, log = rig("paged", slots=40), StepLog(0.0)
    made.add(5, 1)
    with log.watching(made.engine):
        made.finish()
    (line,) = log.lines
    assert (line.usage_running.held, line.usage.held, line.usage.filled) == (8, 0, 0)
    kinds = [event.kind for event in line.events]
    assert kinds[: line.num_events_planned] == ["taken"] * 2 and kinds[line.num_events_planned :] == ["released"] * 2
    assert [event.filled for event in line.events[2:]] == [1, 4]


def test_what_ends_between_steps_is_in_the_last_line() -> None:
    """An abort after the last step gives blocks back that would else be held for ever."""
    made, log = rig("paged", slots=40), StepLog(0.0)
    request = made.add(5, 9)
    with log.watching(made.engine):
        made.step(2)
        made.engine.abort(request.id)
    assert log.lines[-1].usage.held == 0
    assert [event.kind for event in log.lines[-1].events] == ["released"] * 2
    assert not made.kv.observed


def test_a_look_at_blocks_goes_on() -> None:
    """Events that somebody else had turned on stay on."""
    made = rig("paged", slots=40)
    made.kv.observed = True
    with StepLog(0.0).watching(made.engine):
        pass
    assert made.kv.observed


@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked"])
def test_a_step_takes_as_long_as_the_clock_says(scheduler: str) -> None:
    """From its planning to when its tokens were there; its parts are measured within that."""
    folder = tiny("llama_gqa")
    report = next(r for r in stack_reports(folder) if r.runs and r.stack.scheduler.name == scheduler and r.stack.allocator.name == "paged")
    engine = build(folder, report.stack, max_num_seqs=4, max_model_len=64, num_kv_slots=256).engine
    log = StepLog(engine.clock.now())
    with log.watching(engine):
        for length in (3, 9):
            engine.add_request(list(range(1, length + 1)), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
        while engine.has_work:
            engine.step()
    ends = 0.0
    for line in log.lines:
        assert ends <= line.start < line.end
        assert 0 < sum(line.seconds.values()) <= line.end - line.start + 1e-6
        ends = line.end
    engine.close()

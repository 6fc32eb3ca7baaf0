"""Reports say when tokens came, how long rows are, and of a step that was undone why; on a clock that moves a second a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.block_map import BlockMap
from octavo.core.errors import OutOfMemoryError
from octavo.core.kv import BlockEvent, BlockState
from octavo.core.testing.rig import Rig


def gaps(rig: Rig) -> Counter[float]:
    """Of the whole run."""
    total: Counter[float] = Counter()
    for report in rig.reports:
        total.update(report.token_gaps)
    return total


def test_steady_decoding_has_one_gap(new_rig: Callable[..., Any]) -> None:
    """Three sequences of five tokens: a wait for each first token, and four gaps of a second each."""
    rig = new_rig()
    for _ in range(3):
        rig.add(4, 5)
    rig.finish()
    firsts = [wait for report in rig.reports for wait in report.first_tokens]
    assert len(firsts) == 3 and gaps(rig) == {1.0: 12}
    assert all(len(report.token_gaps) <= 1 for report in rig.reports)
    assert rig.engine.token_times.num_prompt_tokens == 12 and rig.engine.answers.num_tokens == 15 and rig.engine.num_taken == 3


def test_a_late_arrival_waits_from_its_own_arrival(new_rig: Callable[..., Any]) -> None:
    """Its prompt is computed in the step after it came; the others' gaps stay as they are."""
    rig = new_rig()
    rig.add(4, 6)
    rig.step(3)
    rig.engine.clock.advance(0.5)
    late = rig.add(4, 2)
    rig.engine.clock.advance(0.25)
    rig.finish()
    assert late.first_token is not None and late.first_token - late.arrival == 0.25
    assert gaps(rig) == {1.0: 5, 1.75: 1}


def test_samples_of_one_request_have_gaps_of_their_own(new_rig: Callable[..., Any]) -> None:
    """n = 3, four tokens each: one first token, nine gaps; the prompt counts once and every sample's tokens do."""
    rig = new_rig()
    rig.add(4, 4, n=3, temperature=1.0)
    rig.finish()
    assert sum(len(report.first_tokens) for report in rig.reports) == 1 and sum(gaps(rig).values()) == 9
    assert rig.engine.token_times.num_prompt_tokens == 4 and rig.engine.answers.num_tokens == 12


def test_tokens_count_once_despite_preemptions(new_rig: Callable[..., Any]) -> None:
    """On a small pool: a preempted sequence's wait is one long gap, nothing is counted anew."""
    rig = new_rig(slots=40)
    requests = [rig.add(6, 12) for _ in range(3)]
    rig.finish()
    preemptions = sum(rig.outputs[request.id][-1].num_preemptions for request in requests)
    assert preemptions > 0, "the case did not occur"
    assert rig.engine.scheduler.num_preemptions == preemptions == sum(report.num_preempted for report in rig.reports)
    assert rig.engine.answers.num_tokens == 36 and sum(gaps(rig).values()) == 33 and max(gaps(rig)) > 1.0


def test_tokens_behind_the_end_do_not_count(new_rig: Callable[..., Any]) -> None:
    """Accepted drafts may reach beyond where the output ends."""
    rig = new_rig()
    request = rig.add(4, 2)
    assert rig.engine.answers.append(request.sequences[0], [1, 2, 3, 1], ()) == "length"
    assert rig.engine.answers.num_tokens == len(request.sequences[0].output) == 2


def test_beams_count_what_they_bring(new_rig: Callable[..., Any]) -> None:
    """Tokens of the hypotheses that are given out, however many were tried; the prompt and its wait once, and no gaps."""
    rig = new_rig()
    request = rig.add(4, 5, beam_width=2)
    rig.finish()
    assert rig.engine.answers.num_tokens == sum(len(ids) for ids, _ in rig.answers(request)) > 0
    assert [wait for report in rig.reports for wait in report.first_tokens] == [request.first_token - request.arrival]
    assert rig.engine.token_times.num_prompt_tokens == 4 and not gaps(rig)


def test_rows_are_in_the_report(new_rig: Callable[..., Any]) -> None:
    """Where each begins and how long it is, in the plan's order; they add up to the step's tokens."""
    rig = new_rig()
    rig.add(5, 4)
    rig.add(3, 4)
    rig.finish()
    for plan, report in zip(rig.plans, rig.reports, strict=True):
        assert report.starts == tuple(chunk.start for chunk in plan.chunks)
        assert report.lengths == tuple(chunk.length for chunk in plan.chunks)
        assert sum(report.lengths) == report.num_tokens == plan.num_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_is_undone_is_told_with_its_reason(new_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Rows as planned, no tokens; the steps that follow are as if it had not been, and steps stay in order."""
    rig = new_rig(depth=depth)
    rig.add(4, 5)
    rig.add(4, 5)
    rig.step(2)
    submit, left = rig.runner.submit, [1]

    def failing(plan: Any) -> Any:
        if left.pop() if left else 0:
            raise OutOfMemoryError("full")
        return submit(plan)

    monkeypatch.setattr(rig.runner, "submit", failing)
    rig.finish()
    undone = [report for report in rig.reports if report.error]
    assert len(undone) == depth and {report.error for report in undone} == {"OutOfMemoryError: full"}
    assert all(report.num_rows and not report.token_gaps and not report.first_tokens for report in undone)
    steps = [report.step for report in rig.reports]
    assert steps == sorted(set(steps))
    assert sum(gaps(rig).values()) == 8 and rig.engine.answers.num_tokens == 10


def test_a_map_follows_events() -> None:
    """Shared, left, kept for reuse, evicted, and taken by another: each state in turn."""
    blocks = BlockMap([BlockState(0, 4, ("a",))])
    for event, state in (
        (BlockEvent("taken", 0, 4, "b"), BlockState(0, 4, ("a", "b"))),
        (BlockEvent("cached", 0, 4, key="k"), BlockState(0, 4, ("a", "b"), "k")),
        (BlockEvent("released", 0, 4, "a"), BlockState(0, 4, ("b",), "k")),
        (BlockEvent("released", 0, 4, "b"), BlockState(0, 4, (), "k")),
        (BlockEvent("evicted", 0, 4, key="k"), None),
        (BlockEvent("taken", 0, 4, "c"), BlockState(0, 4, ("c",))),
        (BlockEvent("released", 0, 4, "c"), None),
    ):
        blocks.apply([event])
        assert blocks.states() == ([] if state is None else [state])

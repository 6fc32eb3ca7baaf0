"""Who is served when, in every scheduler: classes, priority and ageing on a simulated trace. A step takes one second.

`policy` is each built-in scheduler in turn, with several sets of options.
"""

from __future__ import annotations

import itertools
from statistics import median
from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.core.options import ClassLimits
from octavo.core.request import Request
from octavo.core.testing.rig import Rig

SEATS = 6
TOKENS = 6  # that a request of the flood answers; its prompt has four


def waits(request: Request) -> float:
    """Steps between its arrival and its first chunk."""
    assert request.first_scheduled is not None, request.id
    return request.first_scheduled - request.arrival


def abort_all(rig: Rig) -> None:
    """End what still waits, and see that nothing is held."""
    for request_id in list(rig.engine.requests):
        rig.engine.abort(request_id)
    rig.finish()


# ----------------------------------------------------------------- priority


@pytest.mark.parametrize(("later", "overtakes"), [(9, True), (10, False), (11, False)])
def test_a_level_of_priority_is_worth_its_ageing(later: int, overtakes: bool, policy: Any) -> None:
    """With ageing = 10 a more urgent request overtakes if it came less than ten seconds later; at ten the older one is first."""
    rig = policy.rig(max_num_seqs=1, order="priority", ageing=10.0)
    rig.add(4, 30)
    rig.step()
    low = rig.add(priority=1)
    rig.step(later)
    urgent = rig.add(priority=0)
    rig.finish()
    assert (urgent.first_scheduled < low.first_scheduled) == overtakes


@pytest.mark.parametrize("slots", [512, 40])
def test_low_priority_is_overtaken_by_those_who_rank_before_it_and_by_nobody_else(slots: int, policy: Any) -> None:
    """Twice as many urgent requests come as can be served, yet the low one waits no longer than for those of its first 20 seconds.

    With 512 slots nobody is preempted, with 40 three requests fit. All start in the order of their ranks (known fault 21).
    """
    rig, urgent = policy.rig(slots=slots, order="priority", ageing=10.0), list[Request]()
    low = rig.add(4, TOKENS, priority=2)
    urgent += [rig.add(4, TOKENS, priority=0) for _ in range(SEATS)]
    while low.first_scheduled is None:
        rig.step()
        urgent += [rig.add(4, TOKENS, priority=0) for _ in range(2)]
        assert rig.clock.now() < 500, "it starves"
    before = [request for request in urgent if request.arrival < 20]
    rounds = len(before) // (SEATS if slots > 40 else 3) + 1  # as many at a time as seats and pool hold
    window = policy.options.get("window_s", 0)
    assert 20 < waits(low) <= rounds * (TOKENS + 4 + window)
    started = [request for request in (low, *urgent) if request.first_scheduled is not None]
    assert {request for request in started if request.rank < low.rank} == set(before)
    for sooner, later in itertools.pairwise(sorted(started, key=lambda request: request.rank)):
        assert sooner.first_scheduled <= later.first_scheduled
    abort_all(rig)


# ------------------------------------------------------------------ classes


CLASSES = {"batch": ClassLimits(max_input_tokens=8, max_output_tokens=12, max_running=2, max_queue=5)}


def test_over_its_running_limit_a_class_waits_and_others_do_not(policy: Any) -> None:
    """Never more than two of the class run at once, whoever else runs (requirement S6); all are served."""
    rig = policy.rig(classes=CLASSES)
    batch = [rig.add(4, 8, class_name="batch") for _ in range(5)]
    others = [rig.add(4, 8) for _ in range(4)]
    most = 0
    while rig.engine.has_work:
        rig.step()
        running = sum(request.class_name == "batch" for request in rig.scheduler.running)
        assert running <= 2
        most = max(most, running)
        if rig.engine.wait_until is not None:
            rig.clock.sleep_until(rig.engine.wait_until)
    assert most == 2
    assert max(request.first_scheduled for request in others) < min(request.first_scheduled for request in batch[2:])


def test_too_long_or_too_many_is_refused_at_once(policy: Any) -> None:
    """Length limits and a full queue are errors at submit; nothing has changed, and other classes are not meant."""
    rig = policy.rig(classes=CLASSES)
    for sizes, text in (
        ((9, 8), "the prompt has 9 tokens, class 'batch' allows max_input_tokens = 8"),
        ((4, 13), "max_tokens is 13, class 'batch' allows max_output_tokens = 12"),
    ):
        with pytest.raises(RequestError, match=text):
            rig.add(*sizes, class_name="batch")
    for _ in range(5):
        rig.add(4, 8, class_name="batch")
    with pytest.raises(RequestError, match="5 requests of class 'batch' wait already, max_queue is 5: try again later"):
        rig.add(4, 8, class_name="batch")
    rig.add(9, 13)
    assert len(rig.engine.requests) == len(rig.scheduler.waiting) == 6
    rig.finish()


def test_within_a_class_narrow_requests_do_not_starve_a_wide_one(policy: Any) -> None:
    """A request of two seats at a limit of two is next when it is its turn, however many of one seat come after it."""
    rig = policy.rig(classes={"batch": ClassLimits(max_running=2)})
    rig.add(4, 5, class_name="batch"), rig.add(4, 8, class_name="batch")
    rig.step()
    wide = rig.add(4, 4, n=2, class_name="batch")
    for _ in range(30):
        rig.add(4, 5, class_name="batch")
        rig.step()
    assert wide.first_scheduled is not None
    assert waits(wide) <= 8 + 1 + policy.options.get("window_s", 0)
    abort_all(rig)


# ---------------------------------------------------------- a flood of batch


def interactive_waits(policy: Any, *, batch: dict[str, Any], **options: Any) -> list[float]:
    """200 batch requests at once, then an interactive one every three steps: how many steps each of these waits."""
    rig, interactive = policy.rig(**options), list[Request]()
    for _ in range(200):
        rig.add(8, 12, **batch)
    for _ in range(40):
        rig.step(3)
        interactive.append(rig.add(4, 4))
    for _ in range(3000):
        if all(request.first_scheduled is not None for request in interactive):
            break
        rig.step()
    result = [waits(request) for request in interactive]
    abort_all(rig)
    return result


def test_a_running_limit_shields_interactive_requests_from_a_flood_of_batch(policy: Any) -> None:
    """With two of six seats for batch, an interactive request starts within a step, in static batching with the next batch.

    Without limits it waits for the flood (200 x 12 tokens on six seats: 400 steps), unless it is more urgent: then for a seat.
    """
    window = policy.options.get("window_s", 0)
    limited = interactive_waits(policy, batch={"class_name": "batch"}, classes={"batch": ClassLimits(max_running=2)})
    urgent = interactive_waits(policy, batch={"priority": 1}, order="priority", ageing=10_000.0)
    unprotected = interactive_waits(policy, batch={})
    assert max(limited) <= (12 + window if policy.plugin.name == "static" else 1)
    assert max(urgent) <= 12 + window
    assert median(unprotected) > 300

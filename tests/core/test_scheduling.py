"""The scheduler base: rank, limits, admission and preemption, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.descriptors import PoolShape
from octavo.core.errors import PluginContractError, RequestError
from octavo.core.kv import Allocator
from octavo.core.options import ClassLimits
from octavo.core.plan import BatchPlan
from octavo.core.plan_builder import PlanBuilder
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduling import Scheduler
from octavo.core.testing.fake_model import decode_alone
from octavo.core.testing.rig import Rig
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions

NewRig = Callable[..., Rig]


class Simple(Scheduler):
    """Who runs goes on, who waits is admitted."""

    chunking = True

    def schedule(self, now: float) -> BatchPlan:
        plan = self.plan()
        for request in list(self.running):
            self.grow(plan, request)
        for request in self.queue():
            if not self.admit(plan, request):
                break
            self.grow(plan, request)
        return plan.build()


def started(rig: Rig, *sizes: int) -> list[Request]:
    """Requests of these prompt lengths that run and have their first token."""
    requests = [rig.add(size, 20) for size in sizes]
    rig.step()
    assert all(request.running for request in requests)
    return requests


# ---------------------------------------------------------------------- rank


def test_first_come_first_served_ignores_priority(new_rig: NewRig) -> None:
    """Under `order = fcfs` arrival alone counts, then the running number."""
    rig = new_rig(Simple, max_num_seqs=1)
    requests = [rig.add(priority=priority) for priority in (2, 0, 1)]
    assert rig.scheduler.waiting == requests
    rig.finish()
    assert [request.first_scheduled for request in requests] == [0.0, 4.0, 8.0]


def test_lower_priority_number_is_sooner(new_rig: NewRig) -> None:
    """Under `order = priority` a level is worth `ageing` seconds."""
    rig = new_rig(Simple, max_num_seqs=1, order="priority", ageing=10.0)
    later, soon, middle = (rig.add(priority=priority) for priority in (2, 0, 1))
    assert rig.scheduler.waiting == [soon, middle, later]
    rig.finish()


def test_low_priority_waits_a_bounded_time(new_rig: NewRig) -> None:
    """However many urgent requests come, one that came levels x ageing seconds before them is served first (known fault 21)."""
    rig = new_rig(Simple, max_num_seqs=1, order="priority", ageing=10.0)
    low = rig.add(priority=2, max_tokens=2)
    for _ in range(60):
        if low.first_scheduled is not None:
            break
        rig.add(priority=0, max_tokens=2)
        rig.step()
    assert low.first_scheduled is not None and 20.0 <= low.first_scheduled <= 50.0
    rig.finish(2000)


# -------------------------------------------------------------------- limits


CLASSES = {"batch": ClassLimits(max_input_tokens=8, max_output_tokens=6, max_running=2, max_queue=3), "default": ClassLimits(max_running=4)}


@pytest.mark.parametrize(
    ("request_", "text", "field"),
    [
        ({"class_name": "gold"}, r"class 'gold' is not configured; known classes: batch, default", "class"),
        ({"class_name": "batch", "prompt_len": 9}, r"the prompt has 9 tokens, class 'batch' allows max_input_tokens = 8", "prompt"),
        ({"class_name": "batch", "max_tokens": 7}, r"max_tokens is 7, class 'batch' allows max_output_tokens = 6", "max_tokens"),
        ({"class_name": "batch", "n": 3}, r"the request needs 3 seats, class 'batch' may run 2", "n"),
        ({"beam_width": 5}, r"the request needs 5 seats, class 'default' may run 4", "beam_width"),
    ],
)
def test_limits_of_a_class_refuse_at_once(request_: dict[str, Any], text: str, field: str, new_rig: NewRig) -> None:
    """Unknown class, too long, too wide: both numbers are in the message, the field is named, nothing has changed."""
    rig = new_rig(Simple, classes=CLASSES)
    with pytest.raises(RequestError, match=text) as caught:
        rig.add(**request_)
    assert caught.value.field == field
    assert not rig.engine.requests and not rig.scheduler.waiting


def test_width_over_max_num_seqs_is_refused(new_rig: NewRig) -> None:
    """It could never be seated."""
    rig = new_rig(Simple, max_num_seqs=2)
    with pytest.raises(RequestError, match="the request needs 3 seats, max_num_seqs is 2"):
        rig.add(n=3)


def test_full_queue_of_a_class_refuses(new_rig: NewRig) -> None:
    """Other classes still wait."""
    rig = new_rig(Simple, classes=CLASSES)
    for _ in range(3):
        rig.add(class_name="batch")
    with pytest.raises(RequestError, match="3 requests of class 'batch' wait already, max_queue is 3: try again later"):
        rig.add(class_name="batch")
    rig.add()
    rig.finish()


def test_over_its_running_limit_a_class_waits_and_others_pass(new_rig: NewRig) -> None:
    """Seats count, not requests."""
    rig = new_rig(Simple, max_num_seqs=6, classes=CLASSES)
    pair, single, other = rig.add(class_name="batch", n=2), rig.add(class_name="batch"), rig.add()
    rig.step()
    assert (pair.running, single.running, other.running) == (True, False, True)
    rig.finish()
    assert single.first_scheduled == 4.0


def test_whole_prompts_must_fit_the_budget_to_their_last_token(new_rig: NewRig) -> None:
    """Without chunking a preempted request computes prompt and outputs in one step: refused with both numbers (faults 19, 52)."""
    rig = new_rig(max_num_batched_tokens=20)
    with pytest.raises(RequestError, match=r"15 prompt tokens \+ max_tokens 7 make steps of up to 21 tokens, max_num_batched_tokens is 20"):
        rig.add(15, 7)
    rig.add(15, 6)
    rig.finish()


# ----------------------------------------------------------------- admission


def test_seats_are_limited(new_rig: NewRig) -> None:
    """A request of three seats does not enter where two are free, and enters when three are."""
    rig = new_rig(Simple, max_num_seqs=4)
    rig.add(max_tokens=3), rig.add(max_tokens=6)
    three = rig.add(n=3)
    rig.step(2)
    assert not three.running
    rig.step(2)
    assert three.running
    rig.finish()


class Candidates(Simple):
    """As `Simple`, but for those that do better to wait."""

    def schedule(self, now: float) -> BatchPlan:
        plan = self.plan()
        for request in list(self.running):
            self.grow(plan, request)
        for request in self.candidates(plan):
            if not self.admit(plan, request):
                break
            self.grow(plan, request)
        return plan.build()


def promised(rig: Rig, *late: Request) -> dict[str, tuple[int, int]]:
    """All that these want is said to be on its way, as long as they are in what is returned."""
    coming = {request.id: (0, len(request.prompt)) for request in late}
    rig.kv.coming = lambda sequence: coming.get(sequence.request.id, (0, 0))  # type: ignore[method-assign]
    return coming


@pytest.mark.parametrize(("late", "passes"), [(2, 0), (1, 1)])
def test_a_seat_stays_free_for_each_that_does_better_later(late: int, passes: int, new_rig: NewRig) -> None:
    """Two of four seats are taken, two candidates wait for a prefix: nobody passes. With one, one passes."""
    rig = new_rig(Candidates, max_num_seqs=4)
    started(rig, 4, 4)
    waiting = [rig.add(8) for _ in range(late)]
    coming = promised(rig, *waiting)
    others = [rig.add(4) for _ in range(2)]
    rig.step()
    assert sum(other.running for other in others) == passes and not any(request.running for request in waiting)
    coming.clear()
    rig.step()
    assert all(request.running for request in waiting)
    rig.finish()


def test_no_more_are_asked_than_there_are_seats(new_rig: NewRig) -> None:
    """A step costs no more where thousands wait for one prefix."""
    rig = new_rig(Candidates, max_num_seqs=4)
    started(rig, 4)
    asked: list[Sequence] = []
    rig.kv.coming = lambda sequence: (0, 8) if asked.append(sequence) is None else (0, 0)  # type: ignore[method-assign,func-returns-value]
    for _ in range(20):
        rig.add(8)
    rig.step()
    assert len(asked) == 3
    rig.kv.coming = lambda sequence: (0, 0)  # type: ignore[method-assign]
    rig.finish()


@pytest.mark.parametrize(("slots", "passes"), [(64, False), (72, True)])
def test_the_pool_stays_free_for_those_that_do_better_later(slots: int, passes: bool, new_rig: NewRig) -> None:
    """Three times 24 slots to the end of all: where there are fewer, nobody takes what somebody before it will need."""
    rig = new_rig(Candidates, slots=slots)
    started(rig, 4)
    promised(rig, rig.add(16, 9))
    other = rig.add(16, 9)
    rig.step()
    assert other.running == passes
    rig.kv.coming = lambda sequence: (0, 0)  # type: ignore[method-assign]
    rig.finish()


def test_a_place_of_its_class_stays_free_for_who_does_better_later(new_rig: NewRig) -> None:
    """One of a class waits for a prefix: no other of the class passes; others do, and so do those of a class without such a limit."""
    rig = new_rig(Candidates, classes={"single": ClassLimits(max_running=1), "default": ClassLimits()})
    started(rig, 4)
    late = rig.add(8, class_name="single")
    coming = promised(rig, late)
    same, other = rig.add(4, class_name="single"), rig.add(4)
    rig.step()
    assert (late.running, same.running, other.running) == (False, False, True)
    coming.clear()
    rig.step()
    assert (late.running, same.running) == (True, False)
    rig.finish()


def test_a_suspended_request_waits_for_no_prefix(new_rig: NewRig) -> None:
    """It has what it computed, in host memory."""
    rig = new_rig(Candidates, slots=32, host=64, preemption="swap")
    started(rig, 8, 8)
    while not rig.reports[-1].num_preempted:
        rig.step()
    (swapped,) = rig.scheduler.waiting
    rig.kv.coming = lambda sequence: (0, 100)  # type: ignore[method-assign]
    rig.finish()
    assert rig.answers(swapped) == decode_alone(swapped)


def test_admitted_only_if_the_whole_prompt_fits(new_rig: NewRig) -> None:
    """A first piece that fits is not enough: it would be admitted and preempted for ever (known fault 17)."""
    rig = new_rig(Simple, slots=36, max_num_batched_tokens=8)
    first = rig.add(20, 16)
    second = rig.add(20, 4)
    rig.finish()
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)
    assert second.first_scheduled is not None and second.first_scheduled >= 16.0


def test_nobody_is_admitted_in_a_step_that_preempts(new_rig: NewRig) -> None:
    """The room that a victim left is not for those that wait: `small`, which would fit, comes just before that step."""
    rehearsal = new_rig(Simple, slots=32)
    started(rehearsal, 8, 8)
    while not rehearsal.reports[-1].num_preempted:
        rehearsal.step()
    rig = new_rig(Simple, slots=32)
    started(rig, 8, 8)
    while len(rig.reports) < len(rehearsal.reports) - 1:
        rig.step()
    small = rig.add(1, 2)
    rig.step()
    assert rig.reports[-1].num_preempted and not small.running
    assert all(chunk.sequence.request not in rig.plans[-1].preempted for chunk in rig.plans[-1].chunks)
    rig.finish()
    assert rig.answers(small) == decode_alone(small)


def test_admission_after_preemption_is_refused_by_the_base(new_rig: NewRig) -> None:
    """Whatever the policy tries."""
    rig = new_rig(Simple)
    (running,) = started(rig, 8)
    waiting = rig.add(4)
    plan = rig.scheduler.plan()
    rig.scheduler.preempt(plan, running)
    assert not rig.scheduler.admit(plan, waiting) and not rig.scheduler.admit(plan, running)
    assert rig.scheduler.admit(rig.scheduler.plan(), waiting)


def test_what_cannot_enter_an_empty_pool_is_failed(new_rig: NewRig) -> None:
    """Not the engine: the request ends with a reason, the others go on."""
    rig = new_rig(Simple, slots=16)
    rig.kv.fits = lambda *requests: True  # type: ignore[method-assign]
    huge, small = rig.add(30, 4), rig.add(4, 4)
    rig.finish()
    assert "the KV pool cannot hold it although nothing else runs" in rig.error(huge)
    assert rig.answers(small) == decode_alone(small)


def test_what_outgrows_the_pool_alone_is_failed(new_rig: NewRig) -> None:
    """The pool was promised to suffice and does not."""
    rig = new_rig(Simple, slots=16)
    rig.kv.fits = lambda *requests: True  # type: ignore[method-assign]
    huge = rig.add(12, 10)
    small = rig.add(4, 4)
    rig.finish()
    ((tokens, _),) = rig.answers(huge)
    assert "the KV pool cannot hold it alone" in rig.error(huge) and len(tokens) == 5
    assert rig.answers(small) == decode_alone(small)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("running", "request 'r' was admitted but does not wait: it runs"),
        ("over", "request 'r' was admitted but does not wait: it is over"),
    ],
)
def test_admitting_what_does_not_wait_breaks_the_contract(state: str, text: str, new_rig: NewRig) -> None:
    """Before anything of it is opened a second time."""
    rig = new_rig(Simple)
    request = rig.add(request_id="r")
    rig.step()
    if state == "over":
        rig.finish()
    with pytest.raises(PluginContractError, match=text):
        rig.scheduler.admit(rig.scheduler.plan(), request)


# ---------------------------------------------------------------- preemption


def test_preempting_what_does_not_run_breaks_the_contract(new_rig: NewRig) -> None:
    """It has nothing to give."""
    rig = new_rig(Simple)
    request = rig.add(request_id="r")
    with pytest.raises(PluginContractError, match="request 'r' was preempted but is not running"):
        rig.scheduler.preempt(rig.scheduler.plan(), request)


def test_the_last_in_rank_is_the_victim(new_rig: NewRig) -> None:
    """And it goes back to its old place in the queue, before those that came later."""
    rig = new_rig(Simple, slots=36)
    first, second, third = started(rig, 8, 8, 8)
    later = rig.add(1, 2)
    while not rig.reports[-1].num_preempted:
        rig.step()
    assert [first.running, second.running, third.running] == [True, True, False]
    assert rig.scheduler.waiting[0] is third and rig.scheduler.waiting[1:] in ([], [later])
    assert later.running is (later not in rig.scheduler.waiting)
    rig.finish()
    assert first.num_preemptions == 0


def test_the_first_in_rank_is_never_preempted_for_others(new_rig: NewRig) -> None:
    """So somebody always gets on."""
    rig = new_rig(Simple, slots=36)
    requests = started(rig, 8, 8, 8)
    rig.finish()
    assert requests[0].num_preemptions == 0
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(rig.answers(request) == decode_alone(request) for request in requests)


def test_a_planned_victim_gives_its_budget_back(new_rig: NewRig) -> None:
    """And its chunk is not in the plan (known fault 20)."""
    rig = new_rig(Simple)
    first, second = started(rig, 8, 8)
    plan = rig.scheduler.plan()
    left = plan.left
    rig.scheduler.grow(plan, second)
    assert plan.left == left - 1
    rig.scheduler.preempt(plan, second)
    assert plan.left == left and second not in plan
    rig.scheduler.grow(plan, first)
    built = plan.build()
    assert [chunk.sequence.request for chunk in built.chunks] == [first] and built.preempted == (second,)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_streams_go_on_where_they_were(preemption: str, new_rig: NewRig) -> None:
    """No repeat, no hole; prompt and outputs are computed again, or come back from the host; usage counts them once (fault 18)."""
    rig = new_rig(Simple, slots=24, host=64, preemption=preemption)
    requests = [rig.add(8, 12, stream=True) for _ in range(2)]
    rig.finish()
    victim = requests[1]
    assert victim.num_preemptions > 0
    assert (sum(report.transfers.get("in", 0) for report in rig.reports) > 0) == (preemption == "swap")
    for request in requests:
        pieces = [token for output in rig.outputs[request.id] for token in output.outputs[0].token_ids]
        ((expected, _),) = decode_alone(request)
        assert pieces == expected
    last = rig.outputs[victim.id][-1]
    assert last.finished and last.num_preemptions == victim.num_preemptions and last.num_cached_tokens == 0


def test_who_does_not_read_the_cache_is_given_none_of_it(new_rig: NewRig) -> None:
    """An allocator that finds cached tokens all the same is told so: positions would have no log probabilities (known fault 7)."""
    rig = new_rig(Simple)
    opens = rig.kv.open
    rig.kv.open = lambda sequence: opens(sequence) or 4  # type: ignore[method-assign]
    rig.add(8, prompt_logprobs=1, request_id="whole")
    with pytest.raises(
        PluginContractError, match="PagedAllocator found 4 cached tokens for request 'whole', which does not read the cache"
    ):
        rig.step()
    assert rig.kv.usage().filled == rig.kv.usage().held == 0


def test_swap_without_room_on_the_host_recomputes(new_rig: NewRig) -> None:
    """All or nothing: what does not fit the host pool is given up and computed again."""
    rig = new_rig(Simple, slots=28, host=4, preemption="swap")
    requests = started(rig, 8, 8)
    rig.finish()
    assert requests[1].num_preemptions > 0
    assert sum(report.transfers.get("out", 0) for report in rig.reports) == 0
    assert all(rig.answers(request) == decode_alone(request) for request in requests)


def test_a_swapped_request_keeps_its_host_copy_when_it_cannot_come_back(new_rig: NewRig) -> None:
    """A refused resumption changes nothing (known fault 51)."""
    rig = new_rig(Simple, slots=28, host=64, preemption="swap")
    first, second = started(rig, 8, 8)
    while not rig.reports[-1].num_preempted:
        rig.step()
    assert second.sequences[0].status is Status.SUSPENDED
    held = rig.kv.usage().host
    for _ in range(3):
        rig.step()
        assert rig.kv.usage().host == held and second.sequences[0].status is Status.SUSPENDED
    rig.finish()
    assert rig.answers(second) == decode_alone(second) and first.num_preemptions == 0


def test_what_a_policy_kept_goes_before_anybody_is_preempted(new_rig: NewRig) -> None:
    """`make_room` is asked first."""

    class Keeps(Simple):
        def __init__(self, options: Any, kv: Allocator) -> None:
            super().__init__(options, kv)
            self.kept: list[Sequence] = []

        def finished(self, sequence: Sequence) -> None:
            self.kept.append(sequence)

        def make_room(self) -> bool:
            kept, self.kept = self.kept, []
            for sequence in kept:
                self.kv.close(sequence)
            return bool(kept)

    rig = new_rig(Keeps, slots=28)
    short, long = rig.add(12, 1), rig.add(8, 16)
    while rig.engine.has_work:
        rig.step()
    assert sum(report.num_preempted + report.num_failed for report in rig.reports) == 0
    assert rig.answers(short) == decode_alone(short) and rig.answers(long) == decode_alone(long)


def test_room_is_reserved_at_admission(new_rig: NewRig) -> None:
    """A policy that overrides `room` has those positions before the first step."""

    class Roomy(Simple):
        def room(self, sequence: Sequence) -> int:
            return sequence.max_positions

    rig = new_rig(Roomy, block_size=1)
    rig.add(8, 9)
    rig.step()
    usage = rig.kv.usage()
    assert (usage.filled, usage.held) == (8, 8)
    rig.finish()


def test_cached_tokens_are_those_of_the_first_admission(new_rig: NewRig, stacks: Any) -> None:
    """What a preempted request finds when it comes back is no cache hit of its prompt (known fault 9)."""
    rig = new_rig(Simple, kv=stacks.sharing(40))
    rig.add(9, 20)
    rig.step()
    second = rig.add(9, 20)
    rig.finish()
    assert second.num_preemptions > 0 and rig.kv.hits[:2] == [0, 8] and rig.kv.hits[-1] == 0
    assert second.num_cached == 8 and rig.outputs[second.id][0].num_cached_tokens == 8


def test_the_plan_of_a_policy_is_its_own(new_rig: NewRig) -> None:
    """Each step starts with the whole budget."""
    rig = new_rig(Simple, max_num_batched_tokens=17)
    plan: PlanBuilder = rig.scheduler.plan()
    assert plan.left == 17 and len(plan) == 0


@pytest.mark.parametrize("reservation", ["paged", "request", "max"])
def test_a_policy_that_keeps_ended_samples_may_preempt_the_rest(new_rig: NewRig, reservation: str) -> None:
    """What was kept has a region and needs no seat: the family that comes back gets as many regions as it has members."""

    class Keeps(Simple):
        steps = 0
        kept: tuple[Sequence, ...] = ()

        def schedule(self, now: float) -> BatchPlan:
            self.steps += 1
            if self.steps % 7 == 0 and self.running:
                plan = self.plan()
                self.preempt(plan, self.running[-1])
                return plan.build()
            return super().schedule(now)

        def finished(self, sequence: Sequence) -> None:
            self.kept = (*self.kept, sequence)

        def make_room(self) -> bool:
            kept, self.kept = self.kept, ()
            for sequence in kept:
                self.kv.close(sequence)
            return bool(kept)

    pool = PoolShape(num_slots=1200, num_host_slots=0, max_model_len=40, max_num_seqs=6)
    options = ContiguousOptions(reservation=reservation) if reservation != "paged" else None  # type: ignore[arg-type]
    for seed in range(12):
        rig = new_rig(Keeps, kv=CONTIGUOUS.build(options, pool) if options else None, slots=1200)
        requests = [rig.add(4, 30, n=n, seed=seed, ignore_eos=False) for n in (3, 2)]
        for _ in range(400):
            if not rig.engine.has_work:
                break
            rig.step()
        for request in requests:
            assert rig.answers(request) == decode_alone(request)

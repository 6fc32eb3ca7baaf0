"""`PlanBuilder` keeps the promises of a plan, whatever a policy asks for."""

from __future__ import annotations

import pytest

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.descriptors import PoolShape
from octavo.core.errors import PluginContractError
from octavo.core.forks import split
from octavo.core.kv import Allocator
from octavo.core.logprobs import TokenLogprobs
from octavo.core.plan_builder import PlanBuilder
from octavo.core.request import Request, Sequence, Status
from octavo.core.sampling_params import SamplingParams
from octavo.plugins.allocators.paged import PAGED, PagedOptions


def pool(slots: int = 64, block_size: int = 4) -> Allocator:
    return PAGED.build(PagedOptions(block_size=block_size), PoolShape(num_slots=slots, num_host_slots=0, max_model_len=64, max_num_seqs=8))


def running(
    kv: Allocator, prompt_len: int = 8, max_tokens: int = 8, *, n: int = 1, beam_width: int = 0, name: str = "r", **asked: int
) -> Request:
    """A request that was admitted and has computed nothing."""
    params = SamplingParams(n=n, max_tokens=max_tokens, **asked)  # type: ignore[arg-type]
    request = Request(
        name,
        tuple(range(1, prompt_len + 1)),
        params,
        max_tokens=max_tokens,
        seed=0,
        beams=BeamSearchParams(beam_width) if beam_width else None,
    )
    request.running = True
    (lead,) = request.sequences
    kv.open(lead)
    lead.status = Status.OPEN
    return request


def computed(kv: Allocator, request: Request, output: int = 1) -> Request:
    """The same, its prompt and all but the last of some output tokens computed."""
    (lead,) = request.sequences
    lead.output = list(range(50, 50 + output))
    lead.num_computed = lead.num_scheduled = lead.num_tokens - 1
    assert kv.reserve(lead, 0, lead.num_computed)
    kv.commit(lead, lead.num_computed)
    return request


def family(kv: Allocator, width: int, *, beam_width: int = 0) -> Request:
    """A request whose prompt has forked into `width` sequences with one token each."""
    request = running(kv, n=1 if beam_width else width, beam_width=beam_width)
    (lead,) = request.sequences
    assert kv.reserve(lead, 0, 8)
    kv.commit(lead, 8)
    lead.num_computed = lead.num_scheduled = 8
    for sequence in split(kv, lead):
        sequence.output = [50 + sequence.sample_index]
    return request


def builder(kv: Allocator, budget: int = 32, *, chunking: bool = True, guesses: list[int] | None = None) -> PlanBuilder:
    proposer = (lambda sequence: list(guesses)) if guesses is not None else None
    return PlanBuilder(kv, budget=budget, chunking=chunking, proposer=proposer)


def test_prompt_becomes_one_chunk_that_samples() -> None:
    """All of the prompt, logits of its last position, a token after it; counted as scheduled once built."""
    kv = pool()
    request, plan = running(kv), builder(kv)
    (lead,) = request.sequences
    assert plan.add(request) and request in plan and len(plan) == 1 and plan.left == 24
    assert lead.num_scheduled == 0
    (chunk,) = plan.build().chunks
    assert chunk == (lead, 0, 8, 7, True, (), 0)
    assert lead.num_scheduled == 8 and lead.awaited is None


def test_logits_reach_back_to_the_first_position_that_is_not_scored() -> None:
    """In pieces, with one in flight, and again after a preemption from what is known on; nothing is drawn there (known fault 7)."""
    kv = pool()
    request = running(kv, prompt_logprobs=0)
    (lead,) = request.sequences
    found = []

    def plan(budget: int) -> None:
        made = builder(kv, budget)
        assert made.add(request)
        (chunk,) = made.build().chunks
        found.append((chunk.start, chunk.logits_from, chunk.sampled_from, chunk.samples))

    plan(3)
    plan(2)  # the first is in flight
    request.score_prompt([TokenLogprobs(2, -1.0, 1)] * 3)
    lead.new_epoch(Status.OPEN)
    plan(2)
    plan(2)
    plan(4)
    assert found == [(0, 0, 3, False), (3, 3, 5, False), (0, 2, 2, False), (2, 3, 4, False), (4, 4, 7, True)]
    request.score_prompt([TokenLogprobs(2, -1.0, 1)] * 4)
    assert request.prompt_scored
    lead.new_epoch(Status.OPEN)
    plan(8)
    assert found[-1] == (0, 7, 7, True)


def test_prompt_is_cut_to_the_budget_or_to_the_limit() -> None:
    """A piece that does not reach the last known token wants no logits and samples nothing."""
    for budget, limit, length in ((5, None, 5), (32, 3, 3)):
        kv = pool()
        request, plan = running(kv), builder(kv, budget)
        assert plan.add(request, limit)
        (chunk,) = plan.build().chunks
        assert (chunk.length, chunk.samples, chunk.logits_from) == (length, False, length)


def test_without_chunking_a_prompt_over_the_budget_is_left_out() -> None:
    """It is not the pool that refuses: the request waits for a step with more budget."""
    kv = pool()
    request, plan = running(kv), builder(kv, 7, chunking=False)
    assert plan.add(request) and request not in plan and plan.left == 7


def test_the_budget_is_never_exceeded() -> None:
    """Whoever comes after the last token is left out."""
    kv = pool()
    requests = [running(kv, name=f"r{number}") for number in range(3)]
    plan = builder(kv, 10)
    assert all(plan.add(request) for request in requests)
    assert [chunk.length for chunk in plan.build().chunks] == [8, 2]


def test_a_sequence_has_at_most_one_chunk() -> None:
    """Adding a request again adds nothing."""
    kv = pool()
    request, plan = running(kv), builder(kv)
    assert plan.add(request, 2) and plan.add(request)
    assert [chunk.length for chunk in plan.build().chunks] == [2]


def test_refusal_plans_nothing() -> None:
    """The pool has no room for the last of three sequences: the request is refused as a whole, the budget untouched."""
    kv = pool(slots=16)
    request = family(kv, 3)
    plan = builder(kv)
    assert not plan.add(request)
    assert request not in plan and plan.left == 32 and plan.build().chunks == ()


def test_drop_refunds_the_budget() -> None:
    """A victim that was planned already gives its tokens back (known fault 20)."""
    kv = pool()
    victim, other = running(kv, name="victim"), running(kv, name="other")
    plan = builder(kv, 10)
    plan.add(victim)
    plan.drop(victim)
    assert plan.left == 10 and victim not in plan
    plan.add(other)
    assert [chunk.sequence.id for chunk in plan.build().chunks] == ["other/0"]
    assert victim.sequences[0].num_scheduled == 0


def test_slots_of_a_dropped_chunk_stay_granted() -> None:
    """They are used when the request is planned again, and nothing is granted twice (known fault 15)."""
    kv = pool()
    request, plan = running(kv), builder(kv)
    plan.add(request)
    held = kv.usage().held
    plan.drop(request)
    plan.build()
    again = builder(kv)
    again.add(request)
    assert held == kv.usage().held == 8
    kv.close(request.sequences[0])
    assert kv.usage().held == 0


def test_what_does_not_run_cannot_be_planned() -> None:
    """A policy that plans a request which it has not admitted breaks its contract."""
    kv = pool()
    request, plan = running(kv), builder(kv)
    request.running = False
    with pytest.raises(PluginContractError, match="request 'r' was planned but is not running: admit it first"):
        plan.add(request)


def test_what_failed_is_left_out() -> None:
    """The first reason counts, and a policy that goes on with the request plans nothing."""
    kv = pool()
    request, plan = running(kv), builder(kv)
    plan.add(request)
    plan.fail(request, "no room")
    plan.fail(request, "another reason")
    assert plan.add(request)
    done = plan.build()
    assert done.failed == ((request, "no room"),) and done.chunks == ()


@pytest.mark.parametrize(("n", "beam_width"), [(2, 0), (1, 2)])
def test_first_samples_of_many_are_awaited(n: int, beam_width: int) -> None:
    """n samples or beams come of one row of logits: nothing more runs until they are there."""
    kv = pool()
    request = running(kv, n=n, beam_width=beam_width)
    plan = builder(kv)
    plan.add(request)
    (chunk,) = plan.build().chunks
    assert request.sequences[0].awaited is chunk
    after = builder(kv)
    assert after.add(request) and request not in after


def test_one_awaited_sequence_holds_its_whole_request() -> None:
    """Siblings sit out too, even those that were looked at before."""
    kv = pool()
    request = family(kv, 2)
    first = builder(kv, guesses=[7])
    first.add(request)
    done = first.build()
    assert [chunk.drafts for chunk in done.chunks] == [(7,), (7,)]
    request.sequences[0].awaited = None
    after = builder(kv)
    assert after.add(request) and len(after) == 0


def test_drafts_come_from_what_is_left() -> None:
    """Budget, the request's end and the pool bound them; they are awaited; logits are wanted from the last known token."""
    for budget, max_tokens, slots, expected in (
        (32, 8, 64, (1, 2, 3)),
        (3, 8, 64, (1, 2)),
        (1, 8, 64, ()),
        (32, 3, 64, (1,)),
        (32, 8, 8, ()),
    ):
        kv = pool(slots, block_size=2)
        request = computed(kv, running(kv, 6, max_tokens))
        plan = builder(kv, budget, guesses=[1, 2, 3])
        plan.add(request)
        (chunk,) = plan.build().chunks
        assert (chunk.drafts, chunk.length, chunk.logits_from) == (expected, 1 + len(expected), 6)
        assert (request.sequences[0].awaited is chunk) == bool(expected)


def test_no_drafts_after_a_placeholder() -> None:
    """The token before them is in flight: nobody can guess what follows it."""
    kv = pool()
    request = computed(kv, running(kv))
    request.sequences[0].num_scheduled += 1
    plan = builder(kv, guesses=[1, 2, 3])
    plan.add(request)
    (chunk,) = plan.build().chunks
    assert chunk.samples and chunk.drafts == ()


def test_no_drafts_for_beams_or_before_the_fork() -> None:
    """Their next step is decided by more than one token."""
    for n, beam_width in ((2, 0), (1, 2)):
        kv = pool()
        plan = builder(kv, guesses=[1])
        plan.add(running(kv, n=n, beam_width=beam_width))
        assert [chunk.drafts for chunk in plan.build().chunks] == [()]


def test_beams_sample_together_or_not_at_all() -> None:
    """One that is behind catches up without sampling, and the ready ones wait for it."""
    kv = pool()
    request = family(kv, 3, beam_width=3)
    late = request.sequences[1]
    late.num_computed = late.num_scheduled = 4
    catching_up = builder(kv)
    assert catching_up.add(request)
    (chunk,) = catching_up.build().chunks
    assert (chunk.sequence, chunk.start, chunk.length, chunk.samples) == (late, 4, 4, False)
    together = builder(kv)
    assert together.add(request)
    assert [(chunk.length, chunk.samples) for chunk in together.build().chunks] == [(1, True)] * 3


def test_beams_wait_for_a_budget_that_holds_them_all() -> None:
    """Two of three would part from the third."""
    kv = pool()
    request = family(kv, 3, beam_width=3)
    plan = builder(kv, 2)
    assert plan.add(request) and len(plan) == 0 and plan.left == 2


def test_recovering_family_computes_its_common_prefix_then_forks() -> None:
    """The lead runs exactly to `restore` and samples nothing; once that is applied the others join (known fault 50)."""
    kv = pool()
    request = family(kv, 2)
    for sequence in request.sequences:
        kv.close(sequence)
        sequence.new_epoch(Status.NEW)
    request.restore = 8
    lead, other = request.sequences
    kv.open(lead)
    lead.status = Status.OPEN
    plan = builder(kv)
    plan.add(request)
    (chunk,) = plan.build().chunks
    assert (chunk.sequence, chunk.stop, chunk.samples) == (lead, 8, False)
    waits = builder(kv)
    assert waits.add(request) and len(waits) == 0 and other.status is Status.NEW
    lead.num_computed = 8
    kv.commit(lead, 8)
    joined = builder(kv)
    joined.add(request)
    assert [(chunk.start, chunk.length, chunk.samples) for chunk in joined.build().chunks] == [(8, 1, True)] * 2
    assert request.restore is None and kv.table(lead)[0][:2].tolist() == kv.table(other)[0][:2].tolist()


def test_transfers_go_out_once() -> None:
    """A copy that a reservation caused belongs to this plan and to no other."""
    kv = pool(block_size=16)
    request = family(kv, 2)
    plan = builder(kv)
    plan.add(request)
    assert [transfer.kind for transfer in plan.build().transfers] == ["copy"]
    assert builder(kv).build().transfers == ()


def test_a_plan_is_a_snapshot() -> None:
    """What happens to a sequence later does not change a plan in flight."""
    kv = pool()
    request = computed(kv, running(kv))
    plan = builder(kv)
    plan.add(request)
    done = plan.build()
    request.sequences[0].new_epoch(Status.DONE)
    assert (done.chunks[0].start, done.chunks[0].epoch, done.num_tokens, bool(done)) == (8, 0, 1, True)
    with pytest.raises(AttributeError):
        done.chunks = ()  # type: ignore[misc]


def test_proposer_sees_the_sequence() -> None:
    """It is asked for each sampling chunk, with the sequence itself."""
    kv = pool()
    asked: list[Sequence] = []

    def propose(sequence: Sequence) -> list[int]:
        asked.append(sequence)
        return []

    request = computed(kv, running(kv))
    plan = PlanBuilder(kv, budget=32, chunking=True, proposer=propose)
    plan.add(request)
    assert plan.build().chunks[0].drafts == () and asked == request.sequences

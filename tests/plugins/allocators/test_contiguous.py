"""Contiguous allocation: a region for each seat, taken before the first token runs; what it wastes is visible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from octavo.core.errors import InvalidOptionsError, PluginContractError, RequestError
from octavo.core.kv import BlockEvent
from octavo.core.plan import Transfer
from octavo.core.request import Sequence
from octavo.plugins.allocators.buddy import Buddy
from octavo.plugins.allocators.contiguous import CONTIGUOUS
from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
from octavo.plugins.allocators.first_fit import FirstFit
from tests.plugins.allocators.memory import compute, fork, request, start


def pool(num_slots: int, reservation: str = "request", *, max_model_len: int = 64, host: int = 0) -> ContiguousAllocator:
    return ContiguousAllocator(FirstFit(num_slots), reservation=reservation, max_model_len=max_model_len, host_capacity=host)


def test_max_at_2048_holds_2048_slots_of_which_30_are_filled() -> None:
    """Requirements, last section."""
    kv = pool(4_096, "max", max_model_len=2_048)
    lead = start(kv, request(30, 100))
    assert kv.region(lead) == (0, 2_048)
    usage = kv.usage()
    assert (usage.filled, usage.held, usage.free) == (30, 2_018, 2_048)


def test_request_takes_the_prompt_and_29_slots_for_30_outputs() -> None:
    """The KV of the last sampled token is never written: P + 29."""
    kv = pool(100)
    lead = start(kv, request(11, 30))
    assert kv.region(lead) == (0, 11 + 29)
    compute(kv, lead, 40)
    assert (kv.usage().filled, kv.usage().held) == (40, 0)


def test_growing_within_the_region_takes_nothing_more() -> None:
    """Fault 15: a grant lasts, whatever becomes of the step it was for."""
    kv = pool(100)
    lead = start(kv, request(4, 8))
    before = kv.region(lead)
    assert kv.reserve(lead, 4, 5)
    assert kv.reserve(lead, 4, 11)
    assert kv.region(lead) == before


def test_positions_past_the_region_are_an_error_not_a_refusal() -> None:
    """No preemption could ever make room for them."""
    kv = pool(100)
    lead = start(kv, request(4, 8))
    with pytest.raises(PluginContractError, match=r"positions 4\.\.11 of 'r/0' were asked for, but its region has 11 slots"):
        kv.reserve(lead, 4, 12)
    with pytest.raises(PluginContractError, match="12 positions of 'r/0' were committed, but its region has 11 slots"):
        kv.commit(lead, 12)


def test_the_first_reserve_takes_regions_for_all_seats_or_none() -> None:
    one = request(4, 5, n=3)
    kv = pool(23)
    lead = one.sequences[0]
    kv.open(lead)
    assert not kv.fits(one)
    assert not kv.reserve(lead, 0, 4)
    usage = kv.usage()
    assert (usage.held, usage.external, usage.free) == (0, 0, 23)
    kv = pool(24)
    assert kv.fits(one)
    kv.open(lead)
    assert kv.reserve(lead, 0, 4)
    assert kv.usage().held == 24


def test_a_fork_copies_what_is_computed_into_a_region_of_its_own() -> None:
    kv = pool(24)
    lead = start(kv, request(4, 5, n=3))
    second, third = fork(kv, lead, 1), fork(kv, lead, 2)
    assert [kv.region(s) for s in (lead, second, third)] == [(0, 8), (8, 8), (16, 8)]
    assert kv.drain_transfers() == [Transfer("copy", 0, 8, 4), Transfer("copy", 0, 16, 4)]
    assert kv.stats().copies == 2
    assert kv.usage().filled == 12
    with pytest.raises(PluginContractError, match="'r/0' was forked more often than its request has seats"):
        kv.fork(lead, Sequence("r/3", lead.request), 4)


def test_a_dropped_beams_region_waits_for_the_next_beam() -> None:
    """The pool is full of others by then, and a fork must not fail."""
    kv = pool(24)
    lead = start(kv, request(4, 5, beam_width=2))
    child = fork(kv, lead)
    start(kv, request(8, 1, name="other"))
    assert kv.usage().free == 0
    kv.close(lead)
    assert kv.usage().free == 0
    again = fork(kv, child, 2)
    assert kv.region(again) == (0, 8)
    kv.close(child)
    kv.close(again)
    assert kv.usage().free == 16
    kv.check()


def test_a_finished_samples_region_goes_back_at_once() -> None:
    kv = pool(24)
    lead = start(kv, request(4, 5, n=3))
    fork(kv, lead, 1)
    lead.request.forked = True
    kv.close(lead)
    assert kv.usage().free == 8
    kv.check()


def test_a_request_that_ends_before_it_forks_gives_all_seats_back() -> None:
    kv = pool(24)
    lead = start(kv, request(4, 5, n=3))
    kv.close(lead)
    assert kv.usage().free == 24
    kv.check()


def test_external_waste_is_free_runs_shorter_than_the_last_refusal_until_the_next_success() -> None:
    kv = pool(30)
    first, second, third = (start(kv, request(10, 1, name=name)) for name in "abc")
    kv.close(first)
    kv.close(third)
    assert (kv.usage().external, kv.usage().free) == (0, 20)
    large = request(15, 1, name="large").sequences[0]
    kv.open(large)
    assert not kv.reserve(large, 0, 15)
    assert (kv.usage().external, kv.usage().free) == (20, 0)
    fitting = start(kv, request(4, 1, name="d"))
    assert (kv.usage().external, kv.usage().free) == (0, 16)
    kv.close(fitting)
    assert not kv.reserve(large, 0, 15)
    kv.close(second)
    assert (kv.usage().external, kv.usage().free) == (0, 30)
    assert kv.reserve(large, 0, 15)


def test_fits_adds_up_several_requests() -> None:
    kv = pool(30)
    assert kv.fits(request(10, 1), request(5, 6, n=2))
    assert not kv.fits(request(11, 1), request(5, 6, n=2))
    assert pool(128, "max").fits(request(1, 1), request(2, 1))
    assert not pool(127, "max").fits(request(1, 1), request(2, 1))


def test_suspend_and_resume_move_what_is_computed() -> None:
    kv = pool(24, host=9)
    lead = start(kv, request(4, 5, n=2))
    child = fork(kv, lead)
    compute(kv, child, 5)
    kv.drain_transfers()
    assert kv.suspend([lead, child])
    assert kv.drain_transfers() == [Transfer("out", 0, 0, 4), Transfer("out", 8, 4, 5)]
    assert (kv.usage().free, kv.usage().host) == (24, 9)
    assert kv.resume([lead, child]) == [4, 5]
    assert kv.drain_transfers() == [Transfer("in", 0, 0, 4), Transfer("in", 4, 8, 5)]
    assert (kv.usage().filled, kv.usage().held, kv.usage().host) == (9, 7, 0)
    kv.check()


@pytest.mark.parametrize("host", range(9))
def test_suspend_is_all_or_nothing(host: int) -> None:
    kv = pool(24, host=host)
    lead = start(kv, request(4, 5, n=2))
    child = fork(kv, lead)
    compute(kv, child, 5)
    kv.drain_transfers()
    before = kv.usage()
    assert not kv.suspend([lead, child])
    assert kv.usage() == before
    assert kv.drain_transfers() == []
    kv.check()


@pytest.mark.parametrize("taken", range(1, 17))
def test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal(taken: int) -> None:
    """Fault 51, under every shortage."""
    kv = pool(16, host=8)
    lead = start(kv, request(4, 5, n=2))
    child = fork(kv, lead)
    assert kv.suspend([lead, child])
    other = start(kv, request(taken, 1, name="other"))
    kv.drain_transfers()
    before = kv.usage()
    assert kv.resume([lead, child]) is None
    after = kv.usage()
    assert (after.filled, after.held, after.free + after.external, after.host) == (before.filled, 0, before.free, 8)
    assert kv.drain_transfers() == []
    kv.check()
    kv.close(other)
    assert kv.resume([lead, child]) == [4, 4]
    kv.check()


def test_events_follow_a_region_from_request_to_sequence_and_back() -> None:
    kv = pool(16)
    kv.observed = True
    lead = start(kv, request(4, 5, n=2))
    kv.close(lead)
    assert kv.drain_events() == [
        BlockEvent("taken", 0, 8, "r"),
        BlockEvent("taken", 8, 8, "r"),
        BlockEvent("released", 0, 8, "r"),
        BlockEvent("taken", 0, 8, "r/0"),
        BlockEvent("released", 0, 8, "r/0", filled=4),
        BlockEvent("released", 8, 8, "r"),
    ]


def test_a_pool_without_room_for_one_region_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidOptionsError, match=r"max_model_len = 64 a sequence takes at least 64 slots, but the KV pool has 63"):
        pool(63, "max")
    with pytest.raises(InvalidOptionsError, match=r"at least 1 slots, but the KV pool has 0"):
        pool(0)


def test_the_descriptor_says_what_a_kernel_must_read() -> None:
    assert CONTIGUOUS.layout == ContiguousAllocator.layout == "region"
    with pytest.raises(TypeError, match="no block tables"):
        pool(1).table(request(1, 1).sequences[0])


def test_a_region_does_not_exist_before_the_first_reserve() -> None:
    kv = pool(8)
    lead = request(4, 1).sequences[0]
    kv.open(lead)
    with pytest.raises(PluginContractError, match="sequence 'r/0' has no region before its first reserve"):
        kv.region(lead)
    kv.close(lead)
    kv.check()


def test_suspending_a_stranger_among_others_changes_nothing() -> None:
    kv = pool(24, host=9)
    lead = start(kv, request(4, 5))
    with pytest.raises(PluginContractError, match="suspend of sequence 'who/0'"):
        kv.suspend([lead, request(4, 5, name="who").sequences[0]])
    assert kv.usage().host == 0
    kv.check()


def spoil_filled(kv: ContiguousAllocator, lead: Sequence) -> None:
    kv._num_filled += 1


def spoil_family(kv: ContiguousAllocator, lead: Sequence) -> None:
    kv._families[lead.request].num_open = 2


def spoil_region(kv: ContiguousAllocator, lead: Sequence) -> None:
    kv._seats[lead].start += 1


def spoil_spare(kv: ContiguousAllocator, lead: Sequence) -> None:
    kv._families[lead.request].spare.clear()


def spoil_seat(kv: ContiguousAllocator, lead: Sequence) -> None:
    kv._seats[lead].num_filled = kv._num_filled = 9


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_filled, "5 slots are counted as filled, the sequences committed 4"),
        (spoil_family, "request 'r' counts 2 open sequences, it has 1"),
        (spoil_region, "slots 0..0 are neither held nor free"),
        (spoil_spare, r"slots 8\.\.15 are neither held nor free"),
        (spoil_seat, "'r/0' sits wrong"),
    ],
)
def test_check_says_what_is_wrong(spoil: Callable[[ContiguousAllocator, Sequence], None], text: str) -> None:
    kv = pool(24)
    lead = start(kv, request(4, 5, n=2))
    kv.check()
    spoil(kv, lead)
    with pytest.raises(PluginContractError, match=text):
        kv.check()


# ------------------------------------------------------------- the paper's baselines


@pytest.mark.parametrize("space", [FirstFit, Buddy])
def test_the_papers_pool_holds_7_regions_of_2048_and_leaves_9_per_cent_external(space: type[FirstFit] | type[Buddy]) -> None:
    """SOSP'23, figures 2 and 13a: 15,728 slots, Orca (Max): a batch of 7, 8.9 % external."""
    kv = ContiguousAllocator(space(15_728), reservation="max", max_model_len=2_048)
    batch = 0
    while True:
        lead = request(100, 50, name=str(batch)).sequences[0]
        kv.open(lead)
        if not kv.reserve(lead, 0, 100):
            break
        batch += 1
    assert batch == 7
    usage = kv.usage()
    assert (usage.external, usage.free) == (1_392, 0)
    assert round(100 * usage.external / kv.capacity, 2) == 8.85


@pytest.mark.parametrize(("reservation", "length"), [("max", 64), ("request", 10 + 24), ("pow2", 10 + 32), ("oracle", 10 + 24)])
def test_what_is_reserved_for_a_prompt_of_10_and_25_outputs(reservation: str, length: int) -> None:
    """The KV of the last output is never written; pow2 reserves for the next power of two of 25, as the paper does."""
    kv = pool(200, reservation)
    assert kv.region(start(kv, request(10, 25))) == (0, length)


def test_oracle_reserves_what_will_be_used_and_request_what_was_asked_for() -> None:
    one = request(10, 25)
    one.params = dataclasses.replace(one.params, known_output_len=5)
    assert pool(200, "oracle").want(one.sequences[0]) == 14
    assert pool(200, "pow2").want(one.sequences[0]) == 18
    assert pool(200, "request").want(one.sequences[0]) == 34


def test_pow2_never_reserves_more_than_the_context() -> None:
    assert pool(200, "pow2").want(request(40, 20).sequences[0]) == 64


def test_what_placement_rounds_up_is_external_waste() -> None:
    kv = ContiguousAllocator(Buddy(64), reservation="request", max_model_len=64)
    lead = start(kv, request(20, 1))
    usage = kv.usage()
    assert (usage.filled, usage.held, usage.external, usage.free) == (20, 0, 12, 32)
    start(kv, request(10, 9, name="b"))
    other = request(33, 1, name="c").sequences[0]
    kv.open(other)
    assert not kv.reserve(other, 0, 33)
    usage = kv.usage()
    assert (usage.filled, usage.held, usage.external, usage.free) == (30, 8, 12 + 14, 0)
    kv.close(lead)
    kv.check()


def test_a_region_rounded_up_must_fit_the_pool() -> None:
    with pytest.raises(InvalidOptionsError, match=r"max_model_len = 100 a sequence takes at least 128 slots, but the KV pool has 127"):
        ContiguousAllocator(Buddy(127), reservation="max", max_model_len=100)


@pytest.mark.parametrize("reservation", ["pow2", "oracle"])
def test_an_unknown_output_length_is_refused_at_submit(reservation: str) -> None:
    one = request(10, 25)
    one.params = dataclasses.replace(one.params, known_output_len=None)
    with pytest.raises(
        RequestError, match=f"reservation = '{reservation}' must know how long the output becomes: set known_output_len"
    ) as error:
        pool(200, reservation).check_request(one)
    assert error.value.field == "known_output_len"
    pool(200, "max").check_request(one)
    pool(200, "request").check_request(one)


def test_an_output_that_may_outgrow_its_region_is_refused_at_submit() -> None:
    """A region never grows: a wrong length would stop the engine in the middle."""
    one = request(10, 25)
    one.params = dataclasses.replace(one.params, known_output_len=17)
    with pytest.raises(RequestError, match="known_output_len is 17, but max_tokens 25 lets the output outgrow its region"):
        pool(200, "oracle").check_request(one)
    pool(200, "pow2").check_request(one)  # 32 fit

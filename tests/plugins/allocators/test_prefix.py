"""Prefix caching: what is found, when it can be found, and that nothing else is ever found."""

from __future__ import annotations

import gc
import hashlib
import sys

import pytest

from octavo.core.kv import BlockEvent
from octavo.core.request import Request, Sequence, Status
from octavo.core.sampling_params import SamplingParams
from octavo.plugins.allocators.prefix.allocator import PrefixAllocator
from octavo.plugins.allocators.prefix.block_keys import HASHES, Hashing, root_key
from tests.plugins.allocators.memory import blocks, compute, request, start

COLLIDING = Hashing(lambda data: b"the same", compare=True)


def pool(num_blocks: int, *, block_size: int = 4, host_blocks: int = 0, hashing: Hashing = HASHES["sha256"]) -> PrefixAllocator:
    return PrefixAllocator(capacity=num_blocks * block_size, block_size=block_size, hashing=hashing, host_capacity=host_blocks * block_size)


def done(kv: PrefixAllocator, one: Request) -> Request:
    """The request's prompt is computed and the request over."""
    lead = start(kv, one)
    lead.status = Status.DONE
    kv.close(lead)
    kv.check()
    return one


def hit(kv: PrefixAllocator, one: Request) -> int:
    """What an admission of this request finds; it is refused."""
    lead = one.sequences[0]
    found = kv.open(lead)
    kv.check()
    kv.close(lead)
    return found


# ------------------------------------------------------------------------ what is found


@pytest.mark.parametrize("hashing", HASHES)
def test_a_prompt_that_begins_alike_shares_the_blocks(hashing: str) -> None:
    kv = pool(16, hashing=HASHES[hashing])
    lead = start(kv, request(10, 4))
    other = request([*range(9), 77, 78], 4, name="other").sequences[0]
    assert kv.open(other) == 8
    assert blocks(kv, other) == blocks(kv, lead)[:2]
    assert (kv.usage().filled, kv.usage().held) == (10, 2)
    assert kv.table(other)[1] == 2  # read once, above: nothing changed since


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_one_token_at_least_is_computed(length: int, found: int) -> None:
    """Fault 2: a fully cached prompt of whole blocks runs its last block again."""
    kv = pool(16)
    done(kv, request(12, 4))
    assert hit(kv, request(length, 4, name="again")) == found


def test_outputs_are_found_by_the_next_turn_of_a_chat() -> None:
    kv = pool(16)
    lead = start(kv, request(5, 9))
    lead.output[:] = [50]
    for token in range(51, 59):
        compute(kv, lead, lead.num_computed + 1)
        lead.output[-1] = token
    turn = [*lead.tokens(), 91, 92]
    kv.close(lead)
    assert hit(kv, request(turn, 4, name="turn")) == 12


def test_what_a_preempted_request_computed_is_found_when_it_comes_back() -> None:
    kv = pool(16)
    lead = start(kv, request(10, 4))
    kv.close(lead)
    assert kv.open(lead) == 8


def test_one_block_per_token_finds_all_but_the_last() -> None:
    kv = pool(16, block_size=1)
    done(kv, request(7, 4))
    assert hit(kv, request(7, 4)) == 6


# ----------------------------------------------------------------- never before, never else


def test_nothing_is_found_before_it_is_committed() -> None:
    """Fault 1: two equal prompts admitted in one step."""
    kv = pool(16)
    first, second = request(9, 4, name="a").sequences[0], request(9, 4, name="b").sequences[0]
    assert kv.open(first) == 0
    assert kv.reserve(first, 0, 9)
    assert kv.open(second) == 0
    assert kv.reserve(second, 0, 9)
    assert not set(blocks(kv, first)) & set(blocks(kv, second))
    kv.commit(first, 6)
    assert hit(kv, request(9, 4, name="c")) == 4
    kv.commit(second, 9)
    kv.check()
    assert hit(kv, request(9, 4, name="c")) == 8


def test_hits_are_pinned_before_blocks_are_taken() -> None:
    """Fault 3: the hit is the oldest that could be evicted, and not free for the request itself."""
    kv = pool(4)
    done(kv, request(8, 1))
    done(kv, request(range(50, 58), 1, name="younger"))
    lead = request([*range(8), *range(90, 98)], 1, name="longer").sequences[0]
    assert kv.open(lead) == 8
    pinned = blocks(kv, lead)
    assert kv.usage().cached == 8
    assert not kv.reserve(lead, 8, 17)
    assert kv.reserve(lead, 8, 16)
    assert blocks(kv, lead)[:2] == pinned
    assert len(set(blocks(kv, lead))) == 4
    kv.check()


def test_a_block_that_is_used_again_is_no_longer_found_by_its_old_content() -> None:
    """Fault 4."""
    kv = pool(2)
    done(kv, request(8, 1))
    lead = request(range(50, 58), 1, name="other").sequences[0]
    kv.open(lead)
    assert kv.reserve(lead, 0, 8)
    assert kv.stats().evictions == 2
    assert hit(kv, request(9, 1)) == 0


def test_a_sequence_enters_its_own_copy_once_anothers_was_given_up() -> None:
    """Two computed the same block at once; who had it found leaves, and its block goes. The other's next block rests on its own."""
    kv = pool(4)
    first, second = request(4, 4, name="a").sequences[0], request(8, 4, name="b").sequences[0]
    kv.open(first)
    kv.open(second)
    compute(kv, first, 4)
    compute(kv, second, 4)
    kv.close(first)
    kv.close(start(kv, request(range(50, 62), 1, name="all")))
    assert hit(kv, request(5, 4)) == 0
    compute(kv, second, 8)
    kv.check()
    assert hit(kv, request(9, 4)) == 8


def test_a_salt_keeps_prompts_apart() -> None:
    """Fault 8."""
    kv = pool(16)
    done(kv, request(9, 4, salt="a"))
    assert hit(kv, request(9, 4)) == 0
    assert hit(kv, request(9, 4, salt="b")) == 0
    assert hit(kv, request(9, 4, salt="a")) == 8


def test_each_extra_enters_the_hash_with_its_kind() -> None:
    """No two lists of extras hash alike, whatever is in their texts."""
    lists = [(), (("salt", "a"),), (("adapter", "a"),), (("salt", ""),), (("salt", "a"), ("adapter", "b")), (("salt", "aadapterb"),)]
    assert len({root_key(HASHES["sha256"].digest, extras) for extras in lists}) == len(lists)


# -------------------------------------------------------------- what is about to be found


@pytest.mark.parametrize("hashing", HASHES)
def test_what_comes_is_what_a_prompt_in_progress_will_enter(hashing: str) -> None:
    kv = pool(32, hashing=HASHES[hashing])
    other = request([*range(14), *range(90, 99)], 4, name="other").sequences[0]
    assert kv.coming(other) == (0, 0)
    lead = start(kv, request(23, 4), 9)
    kv.check()
    assert kv.coming(other) == (8, 12)  # two blocks are there, and the third of both is in progress
    assert kv.coming(request(3, 4, name="short").sequences[0]) == (0, 0)
    assert kv.coming(request(40, 4, name="long").sequences[0]) == (8, 20)  # the first one's last block is never full: outputs follow
    compute(kv, lead, 23)
    first, stop = kv.coming(other)
    assert first == stop  # all is there
    assert hit(kv, other.request) == 12


def test_nothing_comes_from_others_texts_salts_or_the_ended() -> None:
    kv = pool(32)
    same, salted, unlike = request(20, 4, name="same"), request(20, 4, name="salted", salt="s"), request(range(5, 25), 4, name="unlike")
    lead = start(kv, request(20, 4), 2)
    assert [kv.coming(one.sequences[0]) for one in (same, salted, unlike)] == [(0, 16), (0, 0), (0, 0)]
    scored = Request("scored", tuple(range(20)), SamplingParams(max_tokens=4, prompt_logprobs=0), 4, seed=0)
    assert not scored.reads_cache
    assert kv.coming(scored.sequences[0]) == (0, 0)
    kv.close(lead)
    assert kv.coming(same.sequences[0]) == (0, 0)
    lead = start(kv, request(20, 4, name="again"), 2)
    kv.reset()
    assert kv.coming(same.sequences[0]) == (0, 0)
    kv.close(lead)


def test_a_suspended_prompt_is_not_waited_for() -> None:
    kv = pool(32, host_blocks=8)
    lead = start(kv, request(20, 4), 6)
    lead.status = Status.OPEN
    assert kv.suspend([lead])
    assert kv.coming(request(20, 4, name="same").sequences[0]) == (0, 0)
    assert kv.resume([lead]) == [6]
    kv.check()


def test_the_keys_are_a_chain_of_sha256() -> None:
    """Equal keys mean equal tokens from the first on; ids are 32-bit numbers in this machine's order."""
    kv = pool(16)
    kv.observed = True
    done(kv, request([1, 2, 3, 4, 1, 2, 3, 4, 9], 1))
    keys = [event.key for event in kv.drain_events() if event.kind == "cached"]
    data = b"".join(token.to_bytes(4, sys.byteorder) for token in (1, 2, 3, 4))
    first = hashlib.sha256(hashlib.sha256(b"").digest() + data)
    assert keys == [first.hexdigest(), hashlib.sha256(first.digest() + data).hexdigest()]


def test_colliding_keys_share_nothing() -> None:
    """Fault 6: with a hash that always collides, only the very same first block is found, and never another's."""
    kv = pool(16, hashing=COLLIDING)
    done(kv, request(12, 4))
    assert hit(kv, request(range(50, 59), 4)) == 0
    assert hit(kv, request([*range(4), *range(60, 66)], 4)) == 4
    assert hit(kv, request([50, *range(1, 12)], 4)) == 0
    assert hit(kv, request(12, 4, salt="a")) == 0
    other = start(kv, request(range(50, 59), 4, name="other"))
    compute(kv, other, 12)
    assert hit(kv, request(range(50, 59), 4)) == 0
    kv.check()


def test_a_request_that_does_not_read_the_cache_finds_nothing_and_feeds_it() -> None:
    """Fault 7: the logits of every prompt position are wanted."""
    kv = pool(16)
    done(kv, request(9, 4))
    other = request(range(9), 4, name="logprobs")
    other.prompt_scored = False
    assert hit(kv, other) == 0
    longer = request(13, 4, name="longer")
    longer.prompt_scored = False
    done(kv, longer)
    assert hit(kv, request(13, 4)) == 12


def test_a_found_block_that_its_one_holder_writes_is_forgotten_not_copied() -> None:
    """The child shares a part of a full block; its parent leaves."""
    kv = pool(16)
    lead = start(kv, request(8, 4, n=2))
    child = Sequence("r/1", lead.request, 1, output=[7])
    child.request.sequences.append(child)
    kv.fork(lead, child, 6)
    child.num_computed = child.num_scheduled = 6
    kv.close(lead)
    kv.check()
    assert hit(kv, request(9, 4)) == 8
    before = blocks(kv, child)
    assert kv.reserve(child, 6, 7)
    assert blocks(kv, child) == before
    assert kv.stats().copies == 0
    assert hit(kv, request(9, 4)) == 4
    kv.check()


def test_what_follows_a_forgotten_block_is_forgotten_too_and_its_room_is_used_first() -> None:
    """The child writes into the first block of a prefix of three; nobody could reach the other two any more."""
    kv = pool(6)
    done(kv, request(range(50, 58), 1, name="kept"))
    lead = start(kv, request(12, 4, n=2))
    child = Sequence("r/1", lead.request, 1)
    kv.fork(lead, child, 2)
    child.num_computed = child.num_scheduled = 2
    kv.close(lead)
    kv.check()
    assert hit(kv, request(12, 4)) == 8
    assert kv.reserve(child, 2, 4)
    kv.check()
    assert hit(kv, request(12, 4)) == 0
    start(kv, request(range(70, 82), 1, name="other"))
    assert kv.stats().evictions == 0
    assert hit(kv, request(range(50, 59), 1)) == 8
    kv.close(child)
    start(kv, request(range(90, 102), 1, name="all"))
    assert kv.usage().filled == kv.capacity
    kv.check()


def test_a_found_block_that_others_hold_is_copied() -> None:
    kv = pool(16)
    lead = start(kv, request(8, 4, n=2))
    child = Sequence("r/1", lead.request, 1)
    kv.fork(lead, child, 6)
    assert kv.reserve(child, 6, 8)
    assert kv.stats().copies == 1
    assert hit(kv, request(9, 4)) == 8


# ---------------------------------------------------------------------------- hashing


def counting() -> tuple[Hashing, list[int]]:
    calls: list[int] = []

    def digest(data: bytes) -> bytes:
        calls.append(len(data))
        return hashlib.sha256(data).digest()

    return Hashing(digest, compare=False), calls


def test_a_decode_step_hashes_at_most_one_block() -> None:
    """And a prompt each of its blocks once, with one call more for where the chain begins."""
    hashing, calls = counting()
    kv = pool(16, hashing=hashing)
    lead = start(kv, request(13, 12))
    assert len(calls) == 1 + 3
    per_step = []
    while lead.num_next > 0:
        before = len(calls)
        compute(kv, lead, lead.num_computed + 1)
        kv.drain_transfers()  # as the next plan does
        per_step.append(len(calls) - before)
    assert set(per_step) == {0, 1}
    assert sum(per_step) == lead.num_computed // 4 - 3


def test_keys_outlive_close_while_the_request_waits() -> None:
    """A refused admission is tried again each step, and a preempted request comes back: neither hashes anything twice."""
    hashing, calls = counting()
    kv = pool(16, hashing=hashing)
    lead = request(13, 4).sequences[0]
    for _ in range(3):
        kv.open(lead)
        kv.close(lead)
    assert len(calls) == 1 + 3
    start(kv, lead.request)
    kv.close(lead)
    assert kv.open(lead) == 12
    assert len(calls) == 1 + 3


def test_keys_go_with_their_request() -> None:
    """One that is aborted while it waits is never closed again."""
    kv = pool(16)
    waiting, over = request(13, 4), request(13, 4)
    kv.open(waiting.sequences[0])
    kv.close(waiting.sequences[0])
    done(kv, over)
    assert len(kv._away) == 1
    del waiting
    gc.collect()
    assert len(kv._away) == 0


# -------------------------------------------------------------------------------- books


def test_cached_blocks_are_not_counted_as_used_and_serve_anybody() -> None:
    """Fault 44."""
    kv = pool(4)
    done(kv, request(10, 1))
    usage = kv.usage()
    assert (usage.filled, usage.held, usage.cached, usage.free) == (0, 0, 8, 8)
    assert kv.fits(request(16, 1))
    start(kv, request(range(50, 66), 1, name="all"))
    assert kv.usage().filled == 16
    assert kv.stats().evictions == 2


def test_hits_are_counted_at_the_first_run_alone() -> None:
    """Fault 9: not for admissions that were refused, nor when a preempted request comes back."""
    kv = pool(16)
    done(kv, request(9, 4))
    assert hit(kv, request(9, 4, name="refused")) == 8
    assert kv.stats().queried_tokens == 9
    lead = request(10, 4, name="b").sequences[0]
    compute_from = kv.open(lead)
    assert kv.reserve(lead, compute_from, 10)
    kv.commit(lead, 10)
    assert (kv.stats().queried_tokens, kv.stats().hit_tokens) == (19, 8)
    kv.close(lead)
    assert kv.open(lead) == 8
    assert kv.reserve(lead, 8, 10)
    kv.commit(lead, 10)
    stats = kv.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.hit_rate) == (19, 8, 8 / 19)


def test_an_empty_cache_has_no_hit_rate() -> None:
    assert pool(1).stats().hit_rate == 0.0


def test_events_name_what_can_be_found() -> None:
    kv = pool(2)
    kv.observed = True
    done(kv, request(8, 1))
    start(kv, request(range(50, 54), 1, name="b"))
    events = kv.drain_events()
    key = [event.key for event in events if event.kind == "cached"]
    assert events == [
        BlockEvent("taken", 0, 4, "r/0"),
        BlockEvent("taken", 4, 4, "r/0"),
        BlockEvent("cached", 0, 4, key=key[0]),
        BlockEvent("cached", 4, 4, key=key[1]),
        BlockEvent("released", 4, 4, "r/0", filled=4),
        BlockEvent("released", 0, 4, "r/0", filled=4),
        BlockEvent("evicted", 4, 4, key=key[1]),
        BlockEvent("taken", 4, 4, "b/0"),
        BlockEvent("cached", 4, 4, key=key[2]),
    ]


def test_reset_forgets_all_that_was_computed_so_far() -> None:
    """Unused blocks are free, a live sequence keeps its own, and what it computes later rests on what is to be forgotten."""
    kv = pool(16, host_blocks=4)
    done(kv, request(9, 4))
    live, away = start(kv, request(range(50, 59), 9, name="live")), start(kv, request(range(70, 79), 9, name="away"))
    assert kv.suspend([away])
    kv.reset()
    usage = kv.usage()
    assert (usage.filled, usage.cached, usage.free) == (9, 0, 13 * 4)
    assert kv.resume([away]) == [9]
    compute(kv, live, 13)
    compute(kv, away, 13)
    kv.check()
    for one in (request(9, 4), request(range(50, 59), 4), request(range(70, 79), 4)):
        assert hit(kv, one) == 0
    assert kv.stats().evictions == 0
    kv.close(live)
    assert kv.open(live) == 0
    compute(kv, live, live.num_tokens)
    assert hit(kv, request([*range(50, 59)], 4)) == 8


def test_what_comes_back_from_the_host_can_be_found_with_its_next_full_block() -> None:
    kv = pool(8, host_blocks=4)
    lead = start(kv, request(10, 4))
    assert kv.suspend([lead])
    start(kv, request(range(50, 82), 1, name="all")).status = Status.DONE
    kv.close(next(sequence for sequence in list(kv._chains)))
    assert hit(kv, request(9, 4)) == 0
    assert kv.resume([lead]) == [10]
    compute(kv, lead, 12)
    assert hit(kv, request(9, 4)) == 8
    kv.check()


# ------------------------------------------------------------------------------ explain


def test_explain_says_where_and_why_the_cached_prefix_ends() -> None:
    kv = pool(6)
    assert kv.explain(request(9, 4)) == "nothing is cached yet"
    assert kv.explain(request(4, 4)) == "a prompt of 4 tokens has no full block of 4 before its last token, so nothing can be found"
    done(kv, request(12, 4))
    assert kv.explain(request(12, 4)) == "all 2 full blocks are cached: 8 of 12 prompt tokens"
    found = "1 of 2 full blocks are cached; block 1 (tokens 4 to 7) "
    assert kv.explain(request([0, 1, 2, 3, 4, 5, 77, 7, 8], 4)) == found + "differs from what is cached there from token 6 on"
    assert kv.explain(request([0, 1, 2, 3, 77, 5, 6, 7, 8], 4)) == found + "has never been computed after this beginning"
    none = "0 of 2 full blocks are cached; block 0 (tokens 0 to 3) "
    assert kv.explain(request(9, 4, salt="a")) == none + "is cached under another salt"
    assert kv.explain(request(range(50, 59), 4)) == none + "has never been computed"
    silent = request(9, 4)
    silent.prompt_scored = False
    assert kv.explain(silent) == "the request does not read the cache: it wants the logits of every prompt position"
    start(kv, request(range(50, 66), 1, name="other"))
    assert kv.explain(request(13, 4)) == "2 of 3 full blocks are cached; block 2 (tokens 8 to 11) was evicted"


def test_explaining_changes_nothing() -> None:
    kv = pool(6)
    one = done(kv, request(12, 4))
    before = kv.stats(), kv.usage()
    kv.explain(one)
    assert (kv.stats(), kv.usage()) == before

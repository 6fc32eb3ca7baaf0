"""Break one promise of an allocator at a time: a test must notice, or the promise is untested.

`MUTANTS` is the table that the documentation shows: what is broken, and who sees it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from octavo.core.kv import Allocator
from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
from octavo.plugins.allocators.first_fit import FirstFit
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.prefix.allocator import PrefixAllocator
from octavo.plugins.allocators.prefix.block_keys import HASHES
from tests.plugins.allocators import mutants, prefix_mutants
from tests.plugins.allocators.machine import AllocatorMachine
from tests.plugins.allocators.memory import MAX_MODEL_LEN


@dataclass(frozen=True)
class Mutant:
    """`noticed_by`: the state machine, or a test by module and name, called with `arguments`."""

    broken: type[Allocator]
    noticed_by: str = "state machine"
    arguments: tuple[object, ...] = ()


IN_ORDER = "test_promises.test_transfers_of_one_step_are_meant_in_their_order"
ORPHANS = "test_prefix.test_what_follows_a_forgotten_block_is_forgotten_too_and_its_room_is_used_first"
COME_FIRST = "test_promises.test_a_failed_steps_transfers_come_first"
MUTANTS: dict[str, Mutant] = {
    "paged: transfers come in reverse order": Mutant(mutants.PagedReversed, IN_ORDER),
    "paged: transfers come grouped by kind": Mutant(mutants.PagedGrouped, IN_ORDER),
    "paged: a failed step's transfers come last": Mutant(mutants.PagedUnordered, COME_FIRST),
    "paged: a failed step's transfers are lost": Mutant(mutants.PagedForgetful, COME_FIRST),
    "paged: a shared block is written without a copy": Mutant(mutants.WritesShared),
    "paged: copies by the number of positions": Mutant(mutants.CopiesByCount),
    "paged: a copy has no transfer": Mutant(mutants.CopiesWithoutData),
    "paged: the last owner copies too": Mutant(
        mutants.CopiesAlways, "test_paged.test_only_the_shared_block_about_to_be_written_is_copied_and_the_last_owner_writes_in_place"
    ),
    "paged: a fork shares room that its parent has not filled": Mutant(
        mutants.SharesWholeTable, "test_paged.test_a_fork_takes_no_block_beyond_what_it_shares"
    ),
    "paged: a fork isn't counted": Mutant(mutants.SharesUncounted),
    "paged: a refusal takes what there is": Mutant(mutants.TakesWhatThereIs),
    "paged: a grant is forgotten": Mutant(mutants.ForgetsGrant, "test_paged.test_a_grant_outlives_the_step_it_was_for"),
    "paged: close forgets the last block": Mutant(mutants.LeaksTail),
    "paged: heads go before tails": Mutant(mutants.HeadFirst, "test_paged.test_blocks_come_back_tail_first_and_go_out_in_order"),
    "paged: a shared slot counts twice": Mutant(mutants.CountsSharedTwice),
    "paged: what sharing saves is counted in blocks": Mutant(mutants.CountsSavedBlocks),
    "paged: who leaves goes on saving": Mutant(mutants.ForgetsWhoLeft),
    "paged: the table says nothing changed": Mutant(mutants.TableUnchanged),
    "paged: the table does not tell of a copy": Mutant(mutants.TableHidesCopies),
    "paged: a group is resumed one by one": Mutant(
        mutants.ResumesOneByOne, "test_paged_host.test_a_group_is_suspended_once_a_block_and_comes_back_shared_as_it_was"
    ),
    "paged: resume asks for a block too many": Mutant(
        mutants.ResumesTooCarefully, "test_paged_host.test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal", (5,)
    ),
    "paged: resume asks for too few blocks": Mutant(
        mutants.ResumesTooBoldly, "test_paged_host.test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal", (4,)
    ),
    "paged: a refused resume loses the host copy": Mutant(
        mutants.DropsHostCopy, "test_paged_host.test_resume_is_all_or_nothing_and_the_host_copy_survives_a_refusal", (4,)
    ),
    "paged: what was suspended isn't copied in": Mutant(mutants.ForgetsToBringBack),
    "paged: suspend keeps a part": Mutant(mutants.SuspendsSome, "test_paged_host.test_suspend_is_all_or_nothing", (2,)),
    "paged: suspend keeps a shared block twice": Mutant(
        mutants.SuspendsTwice, "test_paged_host.test_a_group_is_suspended_once_a_block_and_comes_back_shared_as_it_was"
    ),
    "paged: host blocks leak": Mutant(mutants.LeaksHost),
    "paged: fits counts one seat": Mutant(mutants.FitsOneSeat, "test_paged.test_fits_counts_what_seats_share_and_is_exact", (4, 44)),
    "paged: a double free is ignored": Mutant(mutants.FreesTwice, "test_promises.test_closing_twice_raises"),
    "paged: events leave forks out": Mutant(mutants.EventsForgetForks),
    "contiguous: transfers come in reverse order": Mutant(mutants.ContiguousReversed, IN_ORDER),
    "contiguous: transfers come grouped by kind": Mutant(mutants.ContiguousGrouped, IN_ORDER),
    "contiguous: a failed step's transfers come last": Mutant(mutants.ContiguousUnordered, COME_FIRST),
    "contiguous: no room is granted for forks": Mutant(mutants.OneSeatOnly),
    "contiguous: a fork has no transfer": Mutant(mutants.ForksWithoutData),
    "contiguous: a transfer is a slot short": Mutant(mutants.ForksTooShort),
    "contiguous: a dropped beam's region is given away": Mutant(mutants.GivesBeamsAway),
    "contiguous: regions are a slot short": Mutant(mutants.OneSlotShort),
    "contiguous: regions are a slot too long": Mutant(
        mutants.OneSlotMore, "test_contiguous.test_request_takes_the_prompt_and_29_slots_for_30_outputs"
    ),
    "contiguous: a refusal keeps some regions": Mutant(mutants.GrantsHalf),
    "contiguous: external waste is never forgotten": Mutant(
        mutants.RemembersRefusal, "test_contiguous.test_external_waste_is_free_runs_shorter_than_the_last_refusal_until_the_next_success"
    ),
    "contiguous: host slots leak": Mutant(mutants.LeaksHostRun),
    "prefix: hits are not pinned": Mutant(prefix_mutants.DoesNotPin, "test_prefix.test_hits_are_pinned_before_blocks_are_taken"),
    "prefix: a prompt of whole blocks is found whole": Mutant(
        prefix_mutants.HitsAll, "test_prefix.test_one_token_at_least_is_computed", (8, 4)
    ),
    "prefix: blocks are entered when they are reserved": Mutant(
        prefix_mutants.RegistersAtReserve, "test_prefix.test_nothing_is_found_before_it_is_committed"
    ),
    "prefix: the salt is ignored": Mutant(prefix_mutants.IgnoresExtras, "test_prefix.test_a_salt_keeps_prompts_apart"),
    "prefix: a weak hash is trusted": Mutant(prefix_mutants.TrustsAnyHash, "test_prefix.test_colliding_keys_share_nothing"),
    "prefix: hits are counted whenever a request is admitted": Mutant(
        prefix_mutants.CountsEveryAdmission, "test_prefix.test_hits_are_counted_at_the_first_run_alone"
    ),
    "prefix: waiting requests are hashed again": Mutant(
        prefix_mutants.ForgetsKeys, "test_prefix.test_keys_outlive_close_while_the_request_waits"
    ),
    "prefix: keys outlive their request": Mutant(prefix_mutants.KeepsKeys, "test_prefix.test_keys_go_with_their_request"),
    "prefix: a reset spares what live sequences computed": Mutant(
        prefix_mutants.ResetsUnusedOnly, "test_prefix.test_reset_forgets_all_that_was_computed_so_far"
    ),
    "prefix: a request that must not read the cache does": Mutant(
        prefix_mutants.ReadsAlways, "test_prefix.test_a_request_that_does_not_read_the_cache_finds_nothing_and_feeds_it"
    ),
    "prefix: a block given up can still be found": Mutant(
        prefix_mutants.KeepsHash, "test_prefix.test_a_block_that_is_used_again_is_no_longer_found_by_its_old_content"
    ),
    "prefix: its one holder writes into a block that can be found": Mutant(
        prefix_mutants.WritesWhatIsFound, "test_prefix.test_a_found_block_that_its_one_holder_writes_is_forgotten_not_copied"
    ),
    "prefix: beginnings go before ends": Mutant(
        prefix_mutants.HeadsFirst, "test_prefix.test_explain_says_where_and_why_the_cached_prefix_ends"
    ),
    "prefix: an end without its beginning stays entered": Mutant(prefix_mutants.LeavesOrphans, ORPHANS),
    "prefix: blocks that cannot be found are lost": Mutant(prefix_mutants.LosesOrphans, ORPHANS),
    "prefix: only ends are ever given up": Mutant(prefix_mutants.ForgetsQueue, ORPHANS),
}


SOUND: tuple[type[Allocator], ...] = (PagedAllocator, ContiguousAllocator, PrefixAllocator)


def build(broken: type[Allocator]) -> Allocator:
    if issubclass(broken, PagedAllocator):
        return broken(capacity=44, block_size=4, host_capacity=28)
    if issubclass(broken, PrefixAllocator):
        return broken(capacity=44, block_size=4, host_capacity=28, hashing=HASHES["sha256"])
    assert issubclass(broken, ContiguousAllocator)
    return broken(FirstFit(66), reservation="request", max_model_len=MAX_MODEL_LEN, host_capacity=28)


def drive(allocator: type[Allocator]) -> None:
    """The same runs each time."""
    machine = type("Machine", (AllocatorMachine,), {"build": staticmethod(lambda: build(allocator)), "seen": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def sound(mutant: Mutant) -> type[Allocator]:
    return next(kind for kind in SOUND if issubclass(mutant.broken, kind))


def find(name: str) -> FunctionType:
    module, test = name.split(".")
    found = getattr(import_module(f"tests.plugins.allocators.{module}"), test)
    assert isinstance(found, FunctionType)
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes with the allocator as it is fails with the mutant in its place."""
    mutant = MUTANTS[name]
    with pytest.raises((Exception, pytest.fail.Exception)):
        if mutant.noticed_by == "state machine":
            drive(mutant.broken)
        elif mutant.noticed_by.startswith("test_promises"):
            find(mutant.noticed_by)(build(mutant.broken))
        else:
            monkeypatch.setitem(find(mutant.noticed_by).__globals__, sound(mutant).__name__, mutant.broken)
            find(mutant.noticed_by)(*mutant.arguments)


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.noticed_by != "state machine"])
def test_a_test_that_notices_passes_without_the_mutant(name: str) -> None:
    """So that it fails for the promise and not for how it is called here."""
    mutant = MUTANTS[name]
    in_promises = mutant.noticed_by.startswith("test_promises")
    find(mutant.noticed_by)(*([build(sound(mutant))] if in_promises else mutant.arguments))


@pytest.mark.slow
@pytest.mark.parametrize("allocator", SOUND)
def test_the_runs_that_notice_pass_without_a_mutant(allocator: type[Allocator]) -> None:
    drive(allocator)

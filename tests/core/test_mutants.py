"""Break one promise at a time: some test must notice. `MUTANTS` is the table of what is broken and who notices.

A mutant replaces a piece of a function's source. `noticed_by` names a test of this folder (or of `tests/plugins/schedulers`) that
passes on the real code and must fail on the broken one, or `random runs`: the random driver with the given fields of its case.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from octavo.core import forks, observers, plan_builder, request_checks
from octavo.core.engine import Engine
from octavo.core.kv import Allocator
from octavo.core.plan_builder import PlanBuilder
from octavo.core.request import Request, Sequence
from octavo.core.scheduling import Scheduler
from octavo.core.testing.random_runs import draw_case, run
from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.paged.block_table import BlockTable
from octavo.plugins.schedulers.chunked import Chunked
from octavo.plugins.schedulers.static import Static

RANDOM = "random runs"
MOST_RUNS = 150
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """`function` with `edits` (what is there, what stands there instead)."""

    function: Any
    edits: tuple[tuple[str, str], ...]
    noticed_by: str
    arguments: dict[str, Any] = field(default_factory=dict)  # of the test, or fixed fields of random cases


def breaks(function: Any, there: str, instead: str, noticed_by: str = RANDOM, **arguments: Any) -> Mutant:
    return Mutant(function, ((there, instead),), noticed_by, arguments)


PLAN, FORKS, POLICY, ENGINE = "test_plan_builder.py::", "test_forks.py::", "test_scheduling.py::", "test_engine.py::"
STATIC, CONTINUOUS = "plugins/schedulers/test_static.py::", "plugins/schedulers/test_continuous.py::"
CHUNKED, SERVICE, FAULTS = "plugins/schedulers/test_chunked.py::", "test_service.py::", "test_known_faults.py::"

MUTANTS: dict[str, Mutant] = {
    # sequences
    "the last token's KV is written too": breaks(Sequence.num_next, "stop = self.max_positions\n", "stop = self.max_positions + 1\n"),
    "nothing is planned after a placeholder": breaks(
        Sequence.num_next, "stop = start + 1", "stop = start", "test_request.py::test_num_next", state={"scheduled": 4}, num_next=1
    ),
    "the epoch does not rise": breaks(Sequence.new_epoch, "self.epoch += 1", "pass", depth=2),
    "a forked request keeps all its seats": breaks(
        Request.seats, "if self.forked and not self.beam_width", "if False", "test_request.py::test_seats_are_the_rows_still_needed"
    ),
    # the plan builder
    "nobody waits for a chunk in flight": breaks(PlanBuilder.add, "if sequence.awaited is not None:", "if False:", depth=2, kind="n"),
    "drafts, samples and beams are not awaited": breaks(PlanBuilder.build, "sequence.awaited = chunk", "pass", depth=2, kind="drafts"),
    "a refused reservation is ignored": breaks(
        PlanBuilder.add, "if not reserve(sequence, start, stop):", "if reserve(sequence, start, stop) is None:"
    ),
    "a sequence is planned twice": breaks(
        PlanBuilder.add, "if sequence in chunks:", "if False:", PLAN + "test_a_sequence_has_at_most_one_chunk"
    ),
    "the budget is exceeded": breaks(
        PlanBuilder.add, "need if need <= left else left if self._chunking else 0", "need", PLAN + "test_the_budget_is_never_exceeded"
    ),
    "a dropped chunk's budget is lost": breaks(
        PlanBuilder.drop, "self.left += chunk.length", "pass", POLICY + "test_a_planned_victim_gives_its_budget_back"
    ),
    "a dropped chunk stays in the plan": breaks(PlanBuilder.drop, "self._chunks.pop(sequence, None)", "self._chunks.get(sequence)"),
    "who does not run is planned": breaks(
        PlanBuilder.add, "if not request.running:", "if False:", PLAN + "test_what_does_not_run_cannot_be_planned"
    ),
    "who failed is planned": breaks(PlanBuilder.add, "if request in self._failed:", "if False:", PLAN + "test_what_failed_is_left_out"),
    "planned tokens are not counted": breaks(PlanBuilder.build, "sequence.num_scheduled = chunk.start + chunk.length", "pass"),
    "drafts exceed the budget": breaks(
        PlanBuilder._with_drafts,
        "min(self.left, sequence.max_positions - chunk.stop)",
        "sequence.max_positions - chunk.stop",
        PLAN + "test_drafts_come_from_what_is_left",
    ),
    "drafts exceed the request's end": breaks(
        PlanBuilder._with_drafts, "min(self.left, sequence.max_positions - chunk.stop)", "self.left", kind="drafts"
    ),
    "drafts follow a placeholder": breaks(
        PlanBuilder._with_drafts,
        "chunk.samples and chunk.stop == sequence.num_tokens",
        "chunk.samples",
        PLAN + "test_no_drafts_after_a_placeholder",
    ),
    "drafts are not reserved": breaks(
        PlanBuilder._with_drafts, "not self._kv.reserve(sequence, chunk.start, chunk.stop + len(drafts))", "False", kind="drafts"
    ),
    "beams sample apart": breaks(
        plan_builder._lockstep, "if not request.forked or together:", "if True:", PLAN + "test_beams_wait_for_a_budget_that_holds_them_all"
    ),
    "beams that are behind sample at once": breaks(
        plan_builder._need, "need -= 1", "pass", PLAN + "test_beams_sample_together_or_not_at_all"
    ),
    # forks
    "a family rejoins at its lead's count": breaks(
        forks.rejoin,
        "request.restore or 0",
        "lead.num_computed",
        FORKS + "test_rejoin_forks_at_the_common_prefix_even_if_the_lead_is_further",
    ),
    "a family rejoins one position too far": breaks(
        forks.rejoin, "request.restore or 0", "(request.restore or 0) + 1", kind="n", ample=False
    ),
    "the common prefix leaves nothing to run": breaks(
        forks.common_prefix,
        "for sequence in sequences) - 1",
        "for sequence in sequences)",
        FORKS + "test_common_prefix",
        outputs=[[7], [7]],
        expected=4,
    ),
    "beams fork before the dropped are closed": Mutant(
        forks.advance_beams,
        (
            ("        if beam not in heirs:\n            drop(beam)\n", "        pass\n"),
            ("    return False\n", "    for beam, _ in rows:\n        if beam not in heirs:\n            drop(beam)\n    return False\n"),
        ),
        FORKS + "test_dropped_beams_are_closed_before_new_ones_fork",
    ),
    "ties among beams follow the order of rows": breaks(
        forks.pick_beams, "(-h.score, h.output)", "-h.score", FORKS + "test_pick_beams_does_not_depend_on_the_order_of_rows"
    ),
    "beams keep their parent's tokens": breaks(
        forks.advance_beams, "parent.output, parent.score = first.output, first.score", "pass", kind="beams"
    ),
    "samples are numbered alike": breaks(
        forks.split, 'Sequence(f"{request.id}/{i}", request, i)', 'Sequence(f"{request.id}/{i}", request, 0)', kind="n"
    ),
    # the scheduler base
    "somebody is admitted in a step that preempts": breaks(
        Scheduler.admit, "plan.preempted or ", "", POLICY + "test_admission_after_preemption_is_refused_by_the_base"
    ),
    "seats are not counted": breaks(Scheduler.admit, "+ request.seats > self.max_num_seqs", "> 10**6"),
    "the first in rank is the victim": breaks(
        Scheduler.grow, "self.running[-1]", "self.running[0]", POLICY + "test_the_first_in_rank_is_never_preempted_for_others"
    ),
    "a first piece that fits is enough": breaks(
        Scheduler._enter, "max(lead.num_tokens, self.room(lead))", "hit + 1", POLICY + "test_admitted_only_if_the_whole_prompt_fits"
    ),
    "a refused admission stays open": breaks(Scheduler._enter, "self.kv.close(lead)\n", "pass\n", ample=False),
    "a refused resumption counts as done": breaks(
        Scheduler._enter,
        "if counts is None:\n            return False",
        "if counts is None:\n            return True",
        ample=False,
        preemption="swap",
    ),
    "a preempted family does not rejoin": breaks(
        Scheduler.preempt, "request.restore = common_prefix(request.sequences)", "pass", kind="n", ample=False
    ),
    "the preempted keep their progress": breaks(
        Scheduler.preempt, "sequence.new_epoch(Status.NEW)", "sequence.status = Status.NEW", ample=False
    ),
    "the swapped keep their epoch": breaks(
        Scheduler.preempt,
        "sequence.new_epoch(Status.SUSPENDED)",
        "sequence.status = Status.SUSPENDED",
        ample=False,
        depth=2,
        preemption="swap",
    ),
    "nobody asks for what the policy kept": breaks(
        Scheduler.grow, "if self.make_room():", "if False:", POLICY + "test_what_a_policy_kept_goes_before_anybody_is_preempted"
    ),
    "priority beats any waiting": breaks(
        Scheduler.rank, "request.arrival + head_start", "head_start", POLICY + "test_low_priority_waits_a_bounded_time"
    ),
    "narrow requests overtake a wide one of their class": breaks(
        Scheduler.queue,
        "held_back.add(request.class_name)",
        "pass",
        SERVICE + "test_within_a_class_narrow_requests_do_not_starve_a_wide_one",
        policy="continuous",
    ),
    "a class at its limit holds up the others": breaks(
        Scheduler.queue,
        "held_back.add(request.class_name)",
        "return",
        SERVICE + "test_a_running_limit_shields_interactive_requests_from_a_flood_of_batch",
        policy="chunked",
    ),
    "priority counts under first come first served only": breaks(
        Scheduler.rank,
        'self.options.order == "priority"',
        'self.options.order != "priority"',
        SERVICE + "test_low_priority_is_overtaken_by_those_who_rank_before_it_and_by_nobody_else",
        policy="static",
        slots=512,
    ),
    "a class fills up within one step": breaks(
        Scheduler._class_has_room, "return taken +", "return 0 *", POLICY + "test_over_its_running_limit_a_class_waits_and_others_pass"
    ),
    "a recompute counts as cache hits": breaks(
        Scheduler._enter, "if request.num_cached is None:", "if True:", POLICY + "test_cached_tokens_are_those_of_the_first_admission"
    ),
    "what no step can hold is queued": breaks(
        Scheduler.check,
        "if not self.chunking and longest > self.budget:",
        "if False:",
        POLICY + "test_whole_prompts_must_fit_the_budget_to_their_last_token",
    ),
    # the engine
    "results of an older epoch are applied": breaks(
        Engine._apply, "if chunk.epoch != sequence.epoch:", "if sequence.finish_reason is not None:", depth=2, ample=False
    ),
    "an awaited chunk stays awaited": breaks(Engine._apply, "sequence.awaited = None", "pass", kind="n"),
    "rejected drafts count as computed": breaks(Engine._apply, "computed -= rejected", "pass", kind="drafts"),
    "rejected drafts stay scheduled": breaks(Engine._apply, "sequence.num_scheduled -= rejected", "pass", kind="drafts"),
    "KV is committed before it is computed": breaks(
        Engine._apply, "min(computed, sequence.num_tokens - 1)", "sequence.num_tokens", allocator="sharing-4", kind="plain"
    ),
    "the ended keep their KV": breaks(Engine._finish, "self.scheduler.finished(sequence)", "pass"),
    "the aborted keep their KV": breaks(Engine._drop, "if held:", "if False:", kind="aborts"),
    "who failed stays": breaks(
        Engine.step, 'self._end(request, "error", error)', "pass", POLICY + "test_what_cannot_enter_an_empty_pool_is_failed"
    ),
    "the last piece is not marked": breaks(Engine._complete, "self._outputs[-1].finished = True", "pass"),
    "a step that only preempts is not told": breaks(
        Engine.step,
        "if plan.preempted or plan.failed:",
        "if False:",
        "test_observers.py::test_a_step_without_work_is_told_if_somebody_left",
    ),
    "the planned step is told, not the applied": breaks(
        Engine.step, "self._tell(oldest)", "self._tell(flight)", "test_observers.py::test_each_step_is_told_once"
    ),
    "preempting for ever is progress": breaks(
        Engine._check_progress, "self._barren += 1", "pass", ENGINE + "test_a_policy_that_preempts_for_ever_is_stuck"
    ),
    "a refused request changes the seeds": breaks(
        Engine.add_request,
        "check_request(request, self)",
        "self._next_order += 1; check_request(request, self)",
        ENGINE + "test_a_refused_request_leaves_no_trace",
    ),
    "a rollback leaves tokens scheduled": breaks(Engine._rollback, "sequence.num_scheduled = sequence.num_computed", "pass", failures=True),
    "a rollback leaves chunks awaited": breaks(Engine._rollback, "sequence.awaited = None", "pass", failures=True, kind="n"),
    "a rollback loses transfers": breaks(Engine._rollback, "self.kv.requeue(flight.plan.transfers)", "pass", failures=True, kind="n"),
    "a rollback repeats transfers": breaks(
        Engine._rollback,
        "flight.handle is None or not flight.handle.transfers_done",
        "True",
        ENGINE + "test_transfers_of_a_failed_step_come_first_in_the_next",
    ),
    "a rollback queues transfers last": breaks(
        Allocator.requeue,
        "self._transfers[:0] = transfers",
        "self._transfers += transfers",
        failures=True,
        preemption="swap",
        ample=False,
        kind="n",
    ),
    "the runner is not told of a rollback": breaks(Engine._rollback, "self.runner.forget()", "pass", failures=True, depth=2),
    # the known faults, in one scheduler each
    "the aborted are not closed": breaks(
        Engine._drop, "if held:", "if False:", FAULTS + "test_12_abort_before_the_first_step_twice_and_after_the_end", policy="static"
    ),
    "a piece that fits is enough": breaks(
        Scheduler._enter,
        "max(lead.num_tokens, self.room(lead))",
        "min(hit + 8, lead.num_tokens)",
        FAULTS + "test_17_what_fits_in_part_is_not_admitted",
        policy="chunked",
    ),
    "a victim goes on from where it was": breaks(
        Scheduler.preempt,
        "sequence.new_epoch(Status.NEW)",
        "sequence.status = Status.NEW",
        FAULTS + "test_18_a_preempted_stream_has_no_repeat_and_no_hole",
        policy="chunked",
        preemption="recompute",
    ),
    "what can never fit is queued": breaks(
        request_checks.check_request,
        "if not kv.fits(request):",
        "if False:",
        FAULTS + "test_19_what_can_never_fit_is_refused_at_submit",
        policy="continuous",
    ),
    "a planned victim stays in the plan": breaks(
        Scheduler.preempt,
        "plan.drop(request)",
        "pass",
        FAULTS + "test_20_a_victim_that_was_planned_gives_its_tokens_back",
        policy="chunked-prefill-first",
    ),
    "a victim goes to the end of the queue": breaks(
        Scheduler.preempt,
        "self.add(request)",
        "self.waiting.append(request)",
        FAULTS + "test_21_who_was_preempted_comes_back_before_those_behind_it",
        policy="continuous",
    ),
    "a preempted family is computed apart": breaks(
        Scheduler.preempt,
        "request.restore = common_prefix(request.sequences)",
        "pass",
        FAULTS + "test_50_a_group_that_fitted_while_it_shared_comes_back",
        policy="chunked",
    ),
    "a resumed request may exceed the budget": breaks(
        Scheduler.check,
        "if not self.chunking and longest > self.budget:",
        "if False:",
        FAULTS + "test_52_a_resumed_request_is_within_the_budget",
        policy="prefill-first",
    ),
    # observers
    "an observer that raises stays": breaks(
        observers.Observers.tell, "self.remove(observer)", "pass", "test_observers.py::test_one_that_raises_is_logged_and_dropped"
    ),
    # schedulers
    "somebody joins a static batch": breaks(
        Static.schedule, "if not self.running:", "if True:", STATIC + "test_short_beside_long_leaves_its_row_idle_480_steps"
    ),
    "a static batch may outgrow the pool": breaks(
        Static._start_batch,
        "or not self.kv.fits(*self.running, request)",
        "",
        STATIC + "test_a_batch_never_preempts_itself",
        allocator="paged",
    ),
    "a static batch keeps nothing": breaks(
        Static.finished,
        "if self._keeps:",
        "if False:",
        STATIC + "test_kv_of_an_ended_member_goes_with_the_batch_or_at_once",
        release="batch",
        held_between=16,
    ),
    "continuous batching lets the small overtake": breaks(
        Scheduler._enter, "self.chunking or lead.num_tokens - hit <= budget", "True", CONTINUOUS + "test_prompts_are_not_cut"
    ),
    "chunks leave nothing to decodes": breaks(
        Chunked.schedule, "if self._mixes:", "if False:", CHUNKED + "test_decodes_come_first_and_never_pause"
    ),
    "prefill first decodes beside prompts": breaks(
        Chunked.schedule, "if self._mixes:", "if True:", CHUNKED + "test_prefill_first_lets_decodes_pause"
    ),
    "prefill first forgets the decodes": breaks(
        Chunked.schedule, "if not self._mixes and not len(plan):", "if False:", CHUNKED + "test_prefill_first_lets_decodes_pause"
    ),
    "prompts in progress wait for new ones": breaks(
        Chunked.schedule, "for request in prompts:", "for request in ():", CHUNKED + "test_a_prompt_that_ends_makes_room_in_the_same_step"
    ),
    "somebody is admitted without budget": breaks(
        Chunked.schedule, "not plan.left or ", "", CHUNKED + "test_the_budget_is_spent_on_several_prompts"
    ),
    "a long prompt starts with the whole budget": breaks(
        Chunked.schedule,
        "break\n        self.grow(plan, request, self._threshold)",
        "break\n        self.grow(plan, request)",
        CHUNKED + "test_a_long_prompt_runs_at_most_the_threshold",
    ),
    "a long prompt goes on with the whole budget": breaks(
        Chunked.schedule,
        "prompts:\n        self.grow(plan, request, self._threshold)",
        "prompts:\n        self.grow(plan, request)",
        CHUNKED + "test_a_long_prompt_runs_at_most_the_threshold",
    ),
    "a prompt of the threshold is long": breaks(
        Chunked._is_long, "> self._threshold", ">= self._threshold", CHUNKED + "test_short_prompts_overtake_long_ones"
    ),
    "long prompts start without limit": breaks(
        Chunked._candidates, "(is_long and num_long >= self._most_long)", "False", CHUNKED + "test_short_prompts_overtake_long_ones"
    ),
    "a long prompt that the budget holds counts as ending": breaks(
        Chunked._candidates, "not is_long and ", "", CHUNKED + "test_short_prompts_overtake_long_ones"
    ),
    "short prompts do not overtake": breaks(Chunked._candidates, "continue", "return", CHUNKED + "test_short_prompts_overtake_long_ones"),
    "prompts start without limit": breaks(
        Chunked._candidates, "len(unfinished) >= self._most or ", "", CHUNKED + "test_a_limit_of_prompts_in_progress"
    ),
    "nobody ends within its step": breaks(Chunked._candidates, "not ends_now and ", "", CHUNKED + "test_a_limit_of_prompts_in_progress"),
    "who just started does not count": breaks(
        Chunked._candidates, "num_long += is_long", "pass", CHUNKED + "test_short_prompts_overtake_long_ones"
    ),
    "who ends in this step counts as in progress": breaks(
        PlanBuilder.rest, "chunks[s].length if s in chunks else 0", "0", CHUNKED + "test_a_prompt_that_ends_makes_room_in_the_same_step"
    ),
    # allocators, as far as whole runs can tell
    "a shared block is written without a copy": Mutant(
        PagedAllocator.reserve,
        (
            ("and pool.refs[blocks[first]] == 1", ""),
            ("shared = [i for i in written if pool.refs[blocks[i]] > 1]", "shared = []"),
        ),
        RANDOM,
        {"kind": "n", "allocator": "paged-4"},
    ),
    "a fork shares blocks beyond what is computed": breaks(
        PagedAllocator.fork,
        "table.blocks[: self._blocks_for(num_tokens)]",
        "table.blocks",
        FORKS + "test_a_fork_shares_only_what_is_computed",
    ),
    "the block table's changes are not told": breaks(
        BlockTable.replace, "self.dirty_from = min(self.dirty_from, index)", "pass", kind="n", allocator="paged-4"
    ),
    "a region is copied in part": breaks(
        ContiguousAllocator.fork, "seat.start, num_tokens)", "seat.start, num_tokens - 1)", kind="n", allocator="contiguous-request"
    ),
    "transfers run in the wrong order": breaks(
        Allocator.drain_transfers,
        "return transfers",
        "return transfers[::-1]",
        kind="n",
        allocator="paged-4",
        ample=False,
        preemption="swap",
    ),
}


def mutate(function: Any, edits: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the function (or property) the code of its edited source, wherever it was imported to."""
    function = function.fget if isinstance(function, property) else function
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    for there, instead in edits:
        assert source.count(there) == 1, f"{function.__qualname__} no longer holds once: {there}"
        source = source.replace(there, instead)
    module = compile("from __future__ import annotations\n" + source, f"<mutant of {function.__qualname__}>", "exec")
    (code,) = (c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)
    monkeypatch.setattr(function, "__code__", code)


def notices(mutant: Mutant, *, fixtures: dict[str, Any]) -> bool:
    """Whether the test that is named fails, or one of the first random runs does."""
    if mutant.noticed_by == RANDOM:
        stacks = fixtures["stacks"]
        cases = (draw_case(number, schedulers=stacks.schedulers, allocators=stacks.allocators) for number in itertools.count())
        matching = (replace(case, **mutant.arguments) for case in itertools.islice(cases, MOST_RUNS))
        return any(fails(lambda case=case: run(case, stacks.make)) for case in matching)
    file, name = mutant.noticed_by.split("::")
    test = getattr(load(file), name)
    wanted = inspect.signature(test).parameters
    arguments = {key: value for key, value in fixtures.items() if key in wanted} | mutant.arguments
    if "policy" in wanted:
        arguments["policy"] = fixtures["stacks"].policies[arguments["policy"]]
    return fails(lambda: test(**arguments))


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except (Exception, pytest.fail.Exception):
        return True
    return False


def load(file: str) -> ModuleType:
    """A test module by its path."""
    name = f"noticing_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, (HERE.parent if "/" in file else HERE) / file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(
    name: str, stacks: Any, new_rig: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test in the table fails once the promise is broken."""
    mutant = MUTANTS[name]
    mutate(mutant.function, mutant.edits, monkeypatch)
    assert notices(mutant, fixtures={"stacks": stacks, "new_rig": new_rig, "caplog": caplog, "monkeypatch": monkeypatch})


@pytest.mark.parametrize("noticed_by", sorted({m.noticed_by for m in MUTANTS.values()} - {RANDOM}))
def test_who_notices_passes_on_the_real_code(
    noticed_by: str, stacks: Any, new_rig: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Called in the way of this file: a test that always fails would notice everything."""
    for mutant in MUTANTS.values():
        if mutant.noticed_by == noticed_by:
            assert not notices(mutant, fixtures={"stacks": stacks, "new_rig": new_rig, "caplog": caplog})

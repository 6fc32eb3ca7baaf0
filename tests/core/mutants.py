"""What is broken on purpose in the engine's core, and who notices. The machinery: `test_mutants.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.core import beam_search, forks, observers, plan_builder
from octavo.core.answers import Answers
from octavo.core.engine import Engine
from octavo.core.kv import Allocator
from octavo.core.plan_builder import PlanBuilder
from octavo.core.request import Request, Sequence
from octavo.core.speculation import PromptLookup
from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.paged.block_table import BlockTable

RANDOM = "random runs"


@dataclass(frozen=True)
class Mutant:
    """`function` with `edits` (what is there, what stands there instead)."""

    function: Any
    edits: tuple[tuple[str, str], ...]
    noticed_by: str
    arguments: dict[str, Any] = field(default_factory=dict)  # of the test, or fixed fields of random cases


def breaks(function: Any, there: str, instead: str, noticed_by: str = RANDOM, **arguments: Any) -> Mutant:
    return Mutant(function, ((there, instead),), noticed_by, arguments)


PLAN, FORKS, BEAMS, POLICY, ENGINE, LOGPROBS = (
    "test_plan_builder.py::",
    "test_forks.py::",
    "test_beam_search.py::",
    "test_scheduling.py::",
    "test_engine.py::",
    "test_logprobs.py::",
)

CORE: dict[str, Mutant] = {
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
    "a prompt is scored again after a preemption": breaks(
        PlanBuilder.add,
        "max(start, len(request.prompt_logprobs))",
        "start",
        PLAN + "test_logits_reach_back_to_the_first_position_that_is_not_scored",
    ),
    "pieces of prompts are not scored": breaks(
        PlanBuilder.add, "if not request.prompt_scored:", "if not request.prompt_scored and samples:"
    ),
    "a scored prompt is read from the cache": breaks(Request.reads_cache, "self.prompt_scored", "True", allocator="prefix-4", ample=True),
    "a prompt counts as scored too soon": breaks(Request.score_prompt, "len(self.prompt) - 1", "len(self.prompt) - 2"),
    "samples' log probabilities are dealt to the wrong ones": breaks(
        Engine._split, "scored[number : number + 1]", "scored[:1]", kind="n", ample=True
    ),
    "scores of cut tokens count": breaks(
        Answers.append, "for entry in scored[:kept]", "for entry in scored", LOGPROBS + "test_what_is_cut_behind_a_stop_id_is_not_scored"
    ),
    "cut tokens keep their scores": breaks(
        Answers.append, "logprobs += scored[:kept]", "logprobs += scored", LOGPROBS + "test_what_is_cut_behind_a_stop_id_is_not_scored"
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
    # prompt lookup
    "a sequence's last tokens find themselves": breaks(PromptLookup._latest_end, "(sequence, stop - 1)", "(sequence, stop)", kind="drafts"),
    "a prompt's last tokens find themselves": breaks(PromptLookup._up_to, "request.prompt[:-1]", "request.prompt", kind="drafts"),
    "new tokens are noted without those before them": breaks(
        PromptLookup._up_to, "max(known.stop + 1 - self._lengths[0], 0)", "known.stop", kind="drafts"
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
        beam_search.advance_beams,
        (
            ("        if beam not in heirs:\n            drop(beam)\n", "        pass\n"),
            ("    return False\n", "    for beam, _ in rows:\n        if beam not in heirs:\n            drop(beam)\n    return False\n"),
        ),
        BEAMS + "test_dropped_beams_are_closed_before_new_ones_fork",
    ),
    "ties among beams follow the order of rows": breaks(
        beam_search.pick_beams,
        "(-candidate[0], candidate[1], candidate[2])",
        "-candidate[0]",
        BEAMS + "test_pick_beams_does_not_depend_on_the_order_of_rows",
    ),
    "beams keep their parent's tokens": breaks(
        beam_search.advance_beams, "parent.output, parent.score = first.output, first.log_prob", "pass", kind="beams"
    ),
    "what ends behind the first beams counts": breaks(beam_search.pick_beams, "elif ends and rank < width:", "elif ends:", kind="beams"),
    "max_tokens ends no beam": breaks(
        beam_search.pick_beams,
        "last or token in stop_ids",
        "token in stop_ids",
        BEAMS + "test_at_max_tokens_the_first_end_whatever_they_end_with",
    ),
    "a search keeps the first that ended, not the best": breaks(
        beam_search.advance_beams, ", key=rank_of)", ", key=lambda sequence: 0)", BEAMS + "test_the_best_that_ended_are_kept"
    ),
    "a search hopes as if it were at its end": breaks(
        beam_search.is_over, 'params.early_stopping == "never" and params.length_penalty > 0', "True", kind="beams"
    ),
    "a search never stops early": breaks(beam_search.is_over, "if params.early_stopping is True", "if False", kind="beams"),
    "an equal beam keeps a search alive": breaks(
        beam_search.is_over,
        "<= params.score",
        "< params.score",
        BEAMS + "test_when_the_search_is_over",
        early_stopping=False,
        length_penalty=1.0,
        next_best=-4.0,
        over=True,
    ),
    "a search whose row failed goes on": breaks(
        Engine._apply, "beams.pop(request, None)", "pass", BEAMS + "test_rows_without_result_end_the_whole_search"
    ),
    "samples are numbered alike": breaks(
        forks.unborn, 'Sequence(f"{request.id}/{i}", request, i)', 'Sequence(f"{request.id}/{i}", request, 0)', kind="n"
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
        Engine._advance, 'self._end(request, "error", error)', "pass", POLICY + "test_what_cannot_enter_an_empty_pool_is_failed"
    ),
    "the last piece is not marked": breaks(Answers.complete, "self._ready[-1].finished = True", "pass"),
    "a step that only preempts is not told": breaks(
        Engine._advance,
        "if plan.preempted or plan.failed:",
        "if False:",
        "test_observers.py::test_a_step_without_work_is_told_if_somebody_left",
    ),
    "the planned step is told, not the applied": breaks(
        Engine._advance, "self._tell(oldest)", "self._tell(flight)", "test_observers.py::test_each_step_is_told_once"
    ),
    "preempting for ever is progress": breaks(
        Engine._check_progress, "self._barren += 1", "pass", ENGINE + "test_a_policy_that_preempts_for_ever_is_stuck"
    ),
    "a refused request changes the seeds": breaks(
        Engine.add_request,
        "check_request(request, self)",
        "self.num_taken += 1; check_request(request, self)",
        ENGINE + "test_a_refused_request_leaves_no_trace",
    ),
    "a rollback leaves tokens scheduled": breaks(Engine._rollback, "sequence.num_scheduled = sequence.num_computed", "pass", failures=True),
    "a rollback leaves chunks awaited": breaks(Engine._rollback, "sequence.awaited = None", "pass", failures=True, kind="n"),
    "a rollback loses transfers": breaks(
        Engine._rollback, "self.kv.requeue(flight.plan.transfers[done:])", "pass", failures=True, kind="n"
    ),
    "a rollback repeats transfers": breaks(
        Engine._rollback,
        "flight.plan.transfers[done:]",
        "flight.plan.transfers",
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
    # observers
    "an observer that raises stays": breaks(
        observers.Observers.tell, "self.remove(observer)", "pass", "test_observers.py::test_one_that_raises_is_logged_and_dropped"
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

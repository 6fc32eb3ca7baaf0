"""What is broken on purpose in the schedulers and their base, and who notices. The machinery: `test_mutants.py`."""

from __future__ import annotations

from octavo.core import request_checks
from octavo.core.engine import Engine
from octavo.core.plan_builder import PlanBuilder
from octavo.core.scheduling import Scheduler
from octavo.plugins.schedulers.chunked import Chunked
from octavo.plugins.schedulers.static import Static
from tests.core.mutants import POLICY, Mutant, breaks

STATIC, CONTINUOUS = "plugins/schedulers/test_static.py::", "plugins/schedulers/test_continuous.py::"
PREFIX = "plugins/allocators/test_prefix_in_engine.py::"
CHUNKED, SERVICE, FAULTS = "plugins/schedulers/test_chunked.py::", "test_service.py::", "test_known_faults.py::"

POLICIES: dict[str, Mutant] = {
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
    "nobody waits for a common prefix": breaks(
        Scheduler._does_better_later, "stop > first and", "False and", PREFIX + "test_who_shares_little_does_not_wait"
    ),
    "whoever shares a little waits": breaks(
        Scheduler._does_better_later, "and stop - first >=", "or 1 >", PREFIX + "test_who_shares_little_does_not_wait"
    ),
    "the swapped wait for a prefix": breaks(
        Scheduler._does_better_later,
        "sequence.status is Status.SUSPENDED",
        "False",
        POLICY + "test_a_suspended_request_waits_for_no_prefix",
    ),
    "others take the seats of those who wait": breaks(
        Scheduler.candidates,
        "request.seats > free or ",
        "",
        POLICY + "test_a_seat_stays_free_for_each_that_does_better_later",
        late=1,
        passes=1,
    ),
    "others take the slots of those who wait": breaks(
        Scheduler.candidates,
        " or not self.kv.fits(*self.running, *kept, request)",
        "",
        POLICY + "test_the_pool_stays_free_for_those_that_do_better_later",
        slots=64,
        passes=False,
    ),
    "others take the place of their class": breaks(
        Scheduler.candidates,
        "one.class_name == request.class_name",
        "False",
        POLICY + "test_a_place_of_its_class_stays_free_for_who_does_better_later",
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
    "a cache leaves holes in a prompt's scores": breaks(
        Scheduler._enter,
        "if hit and not request.reads_cache:",
        "if False:",
        POLICY + "test_who_does_not_read_the_cache_is_given_none_of_it",
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
        Scheduler.admit, "plan.left <= 0 or ", "", CHUNKED + "test_the_budget_is_spent_on_several_prompts"
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
        Chunked._limited, "(is_long and num_long_places >= self._most_long)", "False", CHUNKED + "test_short_prompts_overtake_long_ones"
    ),
    "a long prompt that the budget holds counts as ending": breaks(
        Chunked._limited, "not is_long and ", "", CHUNKED + "test_short_prompts_overtake_long_ones"
    ),
    "short prompts do not overtake": breaks(Chunked._limited, "continue", "return", CHUNKED + "test_short_prompts_overtake_long_ones"),
    "prompts start without limit": breaks(
        Chunked._limited, "num_places >= self._most or ", "", CHUNKED + "test_a_limit_of_prompts_in_progress"
    ),
    "nobody ends within its step": breaks(Chunked._limited, "not ends_now and ", "", CHUNKED + "test_a_limit_of_prompts_in_progress"),
    "who just started does not count": breaks(
        Chunked._limited, "num_long += is_long", "pass", CHUNKED + "test_short_prompts_overtake_long_ones"
    ),
    "who ends in this step counts as in progress": breaks(
        PlanBuilder.rest, "chunks[s].length if s in chunks else 0", "0", CHUNKED + "test_a_prompt_that_ends_makes_room_in_the_same_step"
    ),
    # the known faults, in one scheduler each
    "the aborted are not closed": breaks(
        Engine._drop, "if held:", "if False:", FAULTS + "test_abort_before_the_first_step_twice_and_after_the_end", policy="static"
    ),
    "a piece that fits is enough": breaks(
        Scheduler._enter,
        "max(lead.num_tokens, self.room(lead))",
        "min(hit + 8, lead.num_tokens)",
        FAULTS + "test_what_fits_in_part_is_not_admitted",
        policy="chunked",
    ),
    "a victim goes on from where it was": breaks(
        Scheduler._enter,
        "lead.num_computed = lead.num_scheduled = hit",
        "lead.num_computed = lead.num_scheduled = hit or (lead.num_tokens - 1 if request.num_preemptions else 0)",
        FAULTS + "test_a_preempted_stream_has_no_repeat_and_no_hole",
        policy="chunked",
        preemption="recompute",
    ),
    "what can never fit is queued": breaks(
        request_checks.check_request,
        "if not kv.fits(request):",
        "if False:",
        FAULTS + "test_what_can_never_fit_is_refused_at_submit",
        policy="continuous",
    ),
    "a planned victim stays in the plan": breaks(
        Scheduler.preempt,
        "plan.drop(request)",
        "pass",
        FAULTS + "test_a_victim_that_was_planned_gives_its_tokens_back",
        policy="chunked-prefill-first",
    ),
    "a victim goes to the end of the queue": breaks(
        Scheduler.preempt,
        "self.add(request)",
        "self.waiting.append(request)",
        FAULTS + "test_who_was_preempted_comes_back_before_those_behind_it",
        policy="continuous",
    ),
    "a preempted family is computed apart": breaks(
        Scheduler.preempt,
        "request.restore = common_prefix(request.sequences)",
        "pass",
        FAULTS + "test_a_group_that_fitted_while_it_shared_comes_back",
        policy="chunked",
    ),
    "a resumed request may exceed the budget": breaks(
        Scheduler.check,
        "if not self.chunking and longest > self.budget:",
        "if False:",
        FAULTS + "test_a_resumed_request_is_within_the_budget",
        policy="prefill-first",
    ),
}

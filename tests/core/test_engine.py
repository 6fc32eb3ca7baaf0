"""The engine: what it refuses, what comes out, how requests end, and what happens when a step or a plugin goes wrong."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

import octavo.core
from octavo.core.errors import EngineStuckError, PluginContractError, RequestError
from octavo.core.plan import BatchPlan
from octavo.core.request import Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduling import Scheduler
from octavo.core.testing.fake_model import EOS, decode_alone
from octavo.core.testing.fake_runner import FailurePoint, InjectedFailure
from octavo.core.testing.rig import Rig
from octavo.core.text.output_text import OutputText
from octavo.core.text.tokenizer import Tokenizer

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


def words() -> Tokenizer:
    """A tokenizer of this vocabulary: each token is a letter."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({letter: i for i, letter in enumerate("-abcd")}, unk_token="-"))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(EOS,), chat_templates={})


# ------------------------------------------------------------------- refusal


@pytest.mark.parametrize(
    ("prompt", "params", "text", "field"),
    [
        ([], {}, "the prompt is empty: give at least one token", "prompt"),
        ([1, 2, 5], {}, r"prompt token id 5 is outside the vocabulary \(0..4\)", "prompt"),
        ([1, -1], {}, r"prompt token id -1 is outside the vocabulary \(0..4\)", "prompt"),
        ([1] * 41, {}, "the prompt has 41 tokens, max_model_len is 40 and one must be left to answer", "prompt"),
        ([1] * 40, {}, "the prompt has 40 tokens, max_model_len is 40 and one must be left to answer", "prompt"),
        ([1] * 40, {"max_tokens": None}, "the prompt has 40 tokens, max_model_len is 40 and one must be left to answer", "prompt"),
        (
            [1] * 30,
            {"max_tokens": 11},
            r"30 prompt tokens \+ max_tokens 11 = 41 exceed max_model_len 40: ask for at most 10",
            "max_tokens",
        ),
        ([1], {"stop_token_ids": [7]}, "stop_token_ids holds 7: must be below the vocabulary's size, which is 5", "stop_token_ids"),
        ([1], {"stop": ["x"]}, "stop strings need a tokenizer", "stop"),
    ],
)
def test_bad_requests_are_refused_at_once(prompt: list[int], params: dict[str, Any], text: str, field: str, new_rig: NewRig) -> None:
    """With the numbers and the field, the engine unharmed and nothing queued (known faults 19, 23, 24, 26)."""
    rig = new_rig()
    with pytest.raises(RequestError, match=text) as caught:
        rig.engine.add_request(prompt, SamplingParams(**params))
    assert caught.value.field == field
    assert not rig.engine.requests and not rig.scheduler.waiting and not rig.engine.has_work
    after = rig.add()
    rig.finish()
    assert rig.answers(after) == decode_alone(after)


def test_what_can_never_fit_the_pool_is_refused(new_rig: NewRig) -> None:
    """With all numbers, and what to do."""
    rig = new_rig(slots=32)
    with pytest.raises(
        RequestError, match=r"can never fit the KV pool: 3 x \(8 prompt \+ 16 output tokens\), the pool has 32 slots: ask for"
    ):
        rig.add(8, 16, n=3)
    rig.add(8, 16)
    rig.finish()


def test_an_id_is_used_once_at_a_time(new_rig: NewRig) -> None:
    """A second request of the same id is refused while the first lives, and taken after."""
    rig = new_rig()
    rig.add(request_id="mine")
    with pytest.raises(RequestError, match="request id 'mine' is in use by an unfinished request"):
        rig.add(request_id="mine")
    rig.finish()
    rig.add(request_id="mine")
    rig.finish()


def test_a_refused_request_leaves_no_trace(new_rig: NewRig) -> None:
    """The random numbers of those that follow are the same with and without it."""
    seeds = []
    for refused in (0, 3):
        rig = new_rig()
        for _ in range(refused):
            with pytest.raises(RequestError):
                rig.engine.add_request([], SamplingParams())
        seeds.append(rig.add().seed)
        rig.finish()
    assert seeds[0] == seeds[1]


def test_max_tokens_none_is_the_rest_of_the_context(new_rig: NewRig) -> None:
    """max_model_len counts prompt and output together (known fault 25)."""
    rig = new_rig()
    request = rig.add(30, None)
    rig.finish()
    ((tokens, reason),) = rig.answers(request)
    assert (len(tokens), reason) == (10, "length")


# ------------------------------------------------------------------- outputs


def test_an_answer_is_whole_and_once(new_rig: NewRig) -> None:
    """Without `stream` there is one output, at the end, with prompt, times and who asked."""
    rig = new_rig()
    request = rig.add(6, 5, request_id="x", user="ada", class_name="default")
    rig.finish()
    (answer,) = rig.outputs["x"]
    assert answer.finished and answer.prompt_token_ids == list(request.prompt) and answer.user == "ada"
    assert answer.outputs[0].finish_reason == "length" and answer.outputs[0].finished
    times = answer.times
    assert times is not None and (times.arrival, times.first_scheduled, times.first_token, times.finished) == (0.0, 0.0, 0.0, 4.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_streamed_pieces_are_the_answer(depth: int, new_rig: NewRig) -> None:
    """Joined per index; one finish reason an index; only the last piece is `finished` and has the times (known fault 41)."""
    rig = new_rig(depth=depth)
    request = rig.add(6, 9, n=3, stream=True, ignore_eos=False)
    rig.finish()
    pieces = rig.outputs[request.id]
    joined: dict[int, list[int]] = {}
    reasons: dict[int, list[str]] = {}
    for piece in (piece for output in pieces for piece in output.outputs):
        joined.setdefault(piece.index, []).extend(piece.token_ids)
        if piece.finish_reason:
            reasons.setdefault(piece.index, []).append(piece.finish_reason)
    expected = decode_alone(request)
    assert [(joined[i], reasons[i]) for i in range(3)] == [(tokens, [reason]) for tokens, reason in expected]
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.times is not None for piece in pieces] == [piece.finished for piece in pieces]


def test_streamed_text_is_the_text(new_rig: NewRig) -> None:
    """Deltas joined are the text of the whole answer, cut at a stop string that no piece shows the beginning of (known fault 28)."""
    texts = []
    plain = new_rig(tokenizer=words())
    request = plain.add(6, 20, seed=5)
    plain.finish()
    whole = plain.outputs[request.id][0].outputs[0].text
    stop = whole[9:12]
    cut = whole[: whole.index(stop)]
    for stream in (False, True):
        rig = new_rig(tokenizer=words())
        request = rig.add(6, 20, seed=5, stream=stream, stop=[stop])
        rig.finish()
        outputs = rig.outputs[request.id]
        texts.append("".join(output.outputs[0].text for output in outputs))
        assert all(cut.startswith("".join(output.outputs[0].text for output in outputs[:i])) for i in range(len(outputs)))
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)
    assert len(whole) == 20 and texts == [cut, cut]


def test_stop_ids_end_a_sequence_but_not_before_min_tokens(new_rig: NewRig) -> None:
    """EOS has no stop reason, a stop id of the request's own is named (known fault 31)."""
    rig = new_rig()
    own = rig.add(4, 16, ignore_eos=True, stop_token_ids=[2], seed=1)
    late = rig.add(4, 16, ignore_eos=True, stop_token_ids=[2], seed=1, min_tokens=12)
    rig.finish()
    ((tokens, reason),) = rig.answers(own)
    assert reason == "stop" and tokens[-1] == 2 and tokens.index(2) == len(tokens) - 1
    assert rig.outputs[own.id][0].outputs[0].stop_reason == 2
    ((tokens, _),) = rig.answers(late)
    assert len(tokens) > 12 or tokens[:12].count(2) == 0
    assert rig.answers(late) == decode_alone(late) and 2 not in tokens[:12]


def test_the_same_seed_gives_the_same_samples_whoever_else_is_there(new_rig: NewRig) -> None:
    """n samples of one seed differ from each other and are the same set next time, with other batch mates (known faults 33, 34)."""
    answers = []
    for mates in (0, 3):
        rig = new_rig()
        for _ in range(mates):
            rig.add(5, 12)
        request = rig.add(6, 12, n=3, seed=11)
        rig.finish()
        answers.append(rig.answers(request))
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens, _ in answers[0]}) == 3


def test_a_streamed_beam_search_is_answered_whole(new_rig: NewRig) -> None:
    """Which beam wins is known at the end: no pieces, aborted or not."""
    rig = new_rig()
    search, gone = rig.add(4, 6, beam_width=3, stream=True), rig.add(4, 6, beam_width=2, stream=True)
    rig.step(3)
    rig.engine.abort(gone.id)
    rig.finish()
    (answer,) = rig.outputs[search.id]
    assert answer.finished and rig.answers(search) == decode_alone(search)
    (aborted,) = rig.outputs[gone.id]
    assert aborted.finished and [output.finish_reason for output in aborted.outputs] == ["abort", "abort"]


def test_times_follow_the_clock(new_rig: NewRig) -> None:
    """First scheduled and first token are those of the request's own first step."""
    rig = new_rig(max_num_seqs=1)
    rig.add(4, 3)
    second = rig.add(4, 2)
    rig.finish()
    assert (second.arrival, second.first_scheduled, second.first_token) == (0.0, 3.0, 3.0)


def test_nobody_but_the_clock_reads_the_time() -> None:
    """Simulations and tests bring a clock of their own, so nothing in core but `clock` imports `time`."""
    folder = Path(str(octavo.core.__file__)).resolve().parent
    readers = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if "time" in names:
                readers.add(file.relative_to(folder).as_posix())
    assert {name for name in readers if not name.startswith("sources/")} == {"clock.py"}


# --------------------------------------------------------------------- abort


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_gives_everything_back(steps: int, stream: bool, depth: int, new_rig: NewRig) -> None:
    """Before the first step, in flight and later: blocks are back at once, what was generated is handed out (faults 11, 12)."""
    rig = new_rig(depth=depth)
    request, other = rig.add(8, 20, stream=stream), rig.add(8, 6)
    rig.step(steps)
    rig.engine.abort(request.id)
    assert request.id not in rig.engine.requests
    rig.engine.abort(request.id)
    rig.step()
    assert rig.outputs[request.id][-1].finished and rig.outputs[request.id][-1].outputs[0].finish_reason == "abort"
    rig.finish()
    ((expected, _),) = decode_alone(request)
    pieces = [token for output in rig.outputs[request.id] for token in output.outputs[0].token_ids]
    assert pieces == expected[: len(pieces)] and len(pieces) == max(0, steps - depth + 1)
    assert rig.answers(other) == decode_alone(other)
    assert sum(report.num_rows for report in rig.reports if report.step > steps + 1) <= 6
    rig.engine.abort(request.id)
    rig.engine.abort("never heard of")


def test_abort_while_waiting_or_preempted(new_rig: NewRig) -> None:
    """Neither queue nor host memory keeps anything of it."""
    rig = new_rig(Simple, slots=28, host=64, preemption="swap")
    first, second = rig.add(8, 20), rig.add(8, 20)
    while not second.num_preemptions:
        rig.step()
    assert rig.kv.usage().host
    rig.engine.abort(second.id)
    assert not rig.kv.usage().host and rig.scheduler.waiting == []
    rig.finish()
    assert rig.answers(first) == decode_alone(first)


def test_close_aborts_everybody(new_rig: NewRig) -> None:
    """The pool is empty, nothing is left to do, no matter what was in flight."""
    rig = new_rig(depth=2)
    rig.add(8, 20), rig.add(8, 20, n=3)
    rig.step(3)
    rig.engine.close()
    usage = rig.kv.usage()
    assert not rig.engine.has_work and (usage.filled, usage.held) == (0, 0)


# ---------------------------------------------------------------- failed steps


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("failure", list(FailurePoint))
def test_a_failed_step_is_undone(failure: FailurePoint, depth: int, new_rig: NewRig) -> None:
    """Counts go back, transfers that were not done are queued again, and the engine goes on to the same tokens."""
    rig = new_rig(Simple, slots=60, host=64, preemption="swap", depth=depth, failures=dict.fromkeys((0, 4, 9, 14, 19), failure))
    requests = [rig.add(8, 12), rig.add(16, 12, n=2), rig.add(4, 12, beam_width=2)]
    failed = 0
    for _ in range(200):
        if not rig.engine.has_work:
            break
        try:
            rig.step()
        except InjectedFailure:
            failed += 1
            live = [sequence for request in rig.engine.requests.values() for sequence in request.sequences]
            assert all(sequence.num_scheduled == sequence.num_computed and sequence.awaited is None for sequence in live)
            rig.kv.check()
    assert failed == 5
    assert [rig.answers(request) for request in requests] == [decode_alone(request) for request in requests]
    usage = rig.kv.usage()
    assert (usage.filled, usage.held, usage.host) == (0, 0, 0)


def test_transfers_of_a_failed_step_come_first_in_the_next(new_rig: NewRig) -> None:
    """In their order, before new ones; those that were done are not repeated."""
    for failure, done in ((FailurePoint.BEFORE_TRANSFERS, 0), (FailurePoint.AMONG_TRANSFERS, 1), (FailurePoint.AFTER_TRANSFERS, 2)):
        rig = new_rig(Simple, block_size=16, failures={1: failure})
        request = rig.add(8, 4, n=3)
        rig.step()
        with pytest.raises(InjectedFailure):
            rig.step()
        copies = rig.plans[1].transfers
        assert [transfer.kind for transfer in copies] == ["copy", "copy"]
        rig.step()
        assert rig.plans[2].transfers == copies[done:]
        rig.finish()
        assert rig.answers(request) == decode_alone(request)


# ------------------------------------------------------------- broken policies


def test_a_policy_that_plans_nothing_is_named(new_rig: NewRig) -> None:
    """EngineStuckError says who, what waits and runs, and what the pool holds."""

    class Lazy(Scheduler):
        def schedule(self, now: float) -> BatchPlan:
            return self.plan().build()

    rig = new_rig(Lazy, slots=64)
    rig.add(), rig.add()
    with pytest.raises(
        EngineStuckError, match=r"Lazy planned nothing although 2 requests wait and 0 run, .*PagedAllocator holds .* of 64 slots"
    ):
        rig.step()


def test_a_policy_that_preempts_for_ever_is_stuck(new_rig: NewRig) -> None:
    """Preempting is no progress: it may happen a few times in a row, not without end."""

    class Nervous(Scheduler):
        chunking = True

        def schedule(self, now: float) -> BatchPlan:
            plan = self.plan()
            for request in self.queue():
                self.admit(plan, request)
            self.preempt(plan, self.running[-1])
            return plan.build()

    rig = new_rig(Nervous)
    rig.add()
    with pytest.raises(EngineStuckError, match="Nervous planned nothing"):
        rig.step(50)


def test_waiting_on_purpose_is_not_stuck(new_rig: NewRig) -> None:
    """`wait_until` says when to ask again, and is gone when there is work."""

    class Patient(Simple):
        def schedule(self, now: float) -> BatchPlan:
            return self.plan().build(wait_until=7.0) if now < 7.0 else super().schedule(now)

    rig = new_rig(Patient)
    rig.add()
    rig.step()
    assert rig.engine.wait_until == 7.0
    rig.clock.sleep_until(7.0)
    rig.step()
    assert rig.engine.wait_until is None
    rig.finish()


def test_an_engine_without_requests_is_not_stuck(new_rig: NewRig) -> None:
    """It plans nothing and says nothing."""
    rig = new_rig()
    assert rig.engine.step() == [] and not rig.engine.has_work


def test_a_request_in_two_lists_breaks_the_contract(new_rig: NewRig) -> None:
    """Seen under `debug`, after the step."""

    class Twice(Simple):
        def schedule(self, now: float) -> BatchPlan:
            plan = super().schedule(now)
            self.waiting += self.running
            return plan

    rig = new_rig(Twice)
    rig.add()
    with pytest.raises(PluginContractError, match="Twice does not keep each live request in exactly one of its lists"):
        rig.step()


def test_a_lost_request_breaks_the_contract(new_rig: NewRig) -> None:
    """Seen under `debug`, although others run on."""

    class Forgetful(Simple):
        def schedule(self, now: float) -> BatchPlan:
            self.waiting[1:] = []
            return super().schedule(now)

    rig = new_rig(Forgetful)
    rig.add(), rig.add()
    with pytest.raises(PluginContractError, match="Forgetful does not keep each live request"):
        rig.step()


def test_planning_without_admission_breaks_the_contract(new_rig: NewRig) -> None:
    """The plan builder is the only way to a plan, and it looks."""

    class Hasty(Scheduler):
        def schedule(self, now: float) -> BatchPlan:
            plan = self.plan()
            for request in self.queue():
                plan.add(request)
            return plan.build()

    rig = new_rig(Hasty)
    rig.add(request_id="r")
    with pytest.raises(PluginContractError, match="request 'r' was planned but is not running: admit it first"):
        rig.step()


def test_usage_that_does_not_add_up_breaks_the_contract(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator's shares must sum to its capacity."""
    rig = new_rig(slots=64)
    rig.add()
    monkeypatch.setattr(rig.kv, "capacity", 65)
    with pytest.raises(PluginContractError, match=r"PagedAllocator: .* does not sum to its capacity of 65 slots"):
        rig.step()


def test_failing_twice_ends_once(new_rig: NewRig) -> None:
    """A policy that goes on with a request which it has failed does no harm."""

    class Stubborn(Simple):
        def schedule(self, now: float) -> BatchPlan:
            plan = self.plan()
            for request in self.queue():
                self.admit(plan, request)
            for request in list(self.running):
                plan.fail(request, "no")
                self.grow(plan, request)
                plan.fail(request, "no again")
            return plan.build()

    rig = new_rig(Stubborn)
    request = rig.add()
    rig.finish()
    assert rig.answers(request) == [([], "error")] and rig.error(request) == "no"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fails_at", range(6))
def test_an_exception_while_a_result_is_applied_loses_no_token(new_rig: NewRig, depth: int, fails_at: int) -> None:
    """Ctrl-C or a bug in the middle of `apply`: what was applied stays, the rest runs again, and all tokens are right."""
    rig = new_rig(Simple, depth=depth)
    requests = [rig.add(5, 6) for _ in range(3)]
    commit, calls = rig.kv.commit, itertools.count()

    def interrupted(sequence: Sequence, num_tokens: int) -> None:
        if next(calls) == fails_at:
            raise KeyboardInterrupt
        commit(sequence, num_tokens)

    rig.kv.commit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rig.finish()
    rig.finish()
    for request in requests:
        assert rig.answers(request) == decode_alone(request)


def test_text_that_cannot_be_made_fails_its_request_alone(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that raises ends the request whose token it was; its neighbour does not notice."""
    rig = new_rig(Simple)
    broken, whole = rig.add(4, 6), rig.add(4, 6)
    text = broken.sequences[0].text
    push, calls = OutputText.push, itertools.count()

    def raising(self: OutputText, tokens: list[int]) -> Any:
        if self is text and next(calls) == 2:
            raise ValueError("no such token")
        return push(self, tokens)

    monkeypatch.setattr(OutputText, "push", raising)
    rig.finish()
    assert rig.error(broken) == "its tokens cannot be turned into text: no such token"
    assert rig.answers(whole) == decode_alone(whole)


def test_a_chunk_without_a_result_fails_its_request_alone(new_rig: NewRig) -> None:
    """Logits that are not finite concern one row."""
    rig = new_rig(Simple)
    broken, whole = rig.add(4, 6), rig.add(4, 6)
    submit, steps = rig.runner.submit, itertools.count()

    def without_result(plan: BatchPlan) -> Any:
        handle = submit(plan)
        if next(steps) != 2:
            return handle
        errors = {0: "no finite logits"}
        return SimpleNamespace(transfers_done=True, result=lambda: replace(handle.result(), errors=errors))

    rig.runner.submit = without_result  # type: ignore[method-assign]
    rig.finish()
    assert rig.error(broken) == "no finite logits"
    assert rig.answers(whole) == decode_alone(whole)


def test_names_of_callers_and_of_the_engine_do_not_meet(new_rig: NewRig) -> None:
    """A caller may name its requests as the engine would."""
    rig = new_rig(Simple)
    named = [rig.add(request_id=f"request-{i}").id for i in (0, 1, 2)]
    assert rig.add().id not in named
    rig.finish()


def test_bounds_of_priority(new_rig: NewRig) -> None:
    """A number that no sort key can hold is refused, and nothing has changed."""
    rig = new_rig(Simple)
    with pytest.raises(RequestError, match="priority must be between"):
        rig.add(priority=10**400)
    assert not rig.engine.requests and not rig.scheduler.waiting
    rig.add()
    rig.finish()


def test_lengths_are_checked_where_max_tokens_is_the_rest_of_the_context(new_rig: NewRig) -> None:
    """min_tokens and known_output_len beyond the context are refused at submit."""
    rig = new_rig(Simple)
    prompt = [1] * (rig.engine.max_model_len - 30)
    with pytest.raises(RequestError, match="known_output_len is 500, but only 30 tokens fit the context"):
        rig.engine.add_request(prompt, SamplingParams(max_tokens=None, known_output_len=500, ignore_eos=True))
    with pytest.raises(RequestError, match="min_tokens is 31, but only 30 tokens fit the context"):
        rig.engine.add_request(prompt, SamplingParams(max_tokens=None, min_tokens=31))


def test_banning_every_token_is_refused(new_rig: NewRig) -> None:
    """min_tokens with a whole vocabulary of stop ids leaves nothing to sample."""
    rig = new_rig(Simple)
    everything = tuple(range(rig.engine.vocab_size))
    with pytest.raises(RequestError, match="every token is a stop token"):
        rig.engine.add_request([1], SamplingParams(min_tokens=2, stop_token_ids=everything))


@pytest.mark.parametrize("plan", [None, [], "nothing"])
def test_a_schedule_that_is_no_plan_is_the_plugins_fault(new_rig: NewRig, plan: Any) -> None:
    """And the message names the policy."""

    class Forgetful(Simple):
        def schedule(self, now: float) -> BatchPlan:
            return plan  # type: ignore[no-any-return]

    rig = new_rig(Forgetful)
    rig.add()
    with pytest.raises(PluginContractError, match=r"Forgetful\.schedule returned .*, not what PlanBuilder\.build makes"):
        rig.step()


@pytest.mark.parametrize("wait_until", [-1.0, 0.0, float("nan"), float("inf")])
def test_waiting_for_what_never_comes_is_being_stuck(new_rig: NewRig, wait_until: float) -> None:
    """A policy that plans nothing and names no time to come hangs nobody."""

    class Waits(Simple):
        def schedule(self, now: float) -> BatchPlan:
            return self.plan().build(wait_until=wait_until)

    rig = new_rig(Waits)
    rig.add()
    with pytest.raises(EngineStuckError):
        rig.step()


def test_eos_ids_outside_the_vocabulary_are_left_out(new_rig: NewRig) -> None:
    """A model's own files may name them; they can never be sampled, nor banned."""
    rig = new_rig(Simple)
    engine = rig.engine
    made = type(engine)(
        scheduler=rig.scheduler, kv=rig.kv, runner=rig.runner, max_model_len=8, vocab_size=4, eos_token_ids=(-1, 0, 3, 4, 99)
    )
    assert made.eos_token_ids == (0, 3)

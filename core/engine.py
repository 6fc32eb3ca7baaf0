"""The engine: requests in, steps, answers out.

    Request --add--> Scheduler.schedule(now) -> BatchPlan -> Runner.submit(plan) -> Handle.result() -> StepResult
       ^                                                                                                  |
       +---- apply: append, num_computed, kv.commit, stop check, scheduler.finished, RequestOutput <------+

`depth` steps may be in flight: at depth 2 the next step is planned while the device still works on the last one.
Must not know: torch, what a policy or an allocator does inside, who asks.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence as Seq

from octavo.core.answers import Answers
from octavo.core.beam_search import Rows, advance_beams
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.clock import Clock, MonotonicClock
from octavo.core.deadlines import Deadlines
from octavo.core.errors import EngineError, EngineStuckError, OutOfMemoryError, PluginContractError
from octavo.core.execution import Runner, StepResult
from octavo.core.flight import Flight, StepReports
from octavo.core.forks import split, unborn
from octavo.core.grammar.compiler import GrammarCompiler
from octavo.core.intake import make_request
from octavo.core.kv import Allocator
from octavo.core.logprobs import TokenLogprobs
from octavo.core.observers import Observers
from octavo.core.outputs import RequestOutput
from octavo.core.plan import BatchPlan
from octavo.core.relief import Relief
from octavo.core.request import Request, Sequence, Status
from octavo.core.request_checks import check_request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduling import Scheduler
from octavo.core.step_checks import check_books
from octavo.core.text.tokenizer import Tokenizer
from octavo.core.token_times import TokenTimes


class Engine:
    """Joins one scheduler, one allocator and one runner. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        kv: Allocator,
        runner: Runner,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        depth: int = 1,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.runner = runner
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)  # a model's files may name others
        self.tokenizer = tokenizer
        self.clock: Clock = clock or MonotonicClock()
        self.seed = seed
        self.depth = depth
        self.debug = debug
        self.answers = Answers(tokenizer)
        self.token_times = TokenTimes()
        self.relief = Relief(scheduler)
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size=vocab_size)
        self.observers = Observers()
        self.reports = StepReports(scheduler=scheduler, kv=kv, observers=self.observers, token_times=self.token_times)
        self.requests: dict[str, Request] = {}
        self.num_taken = 0  # requests since the start
        self.wait_until: float | None = None  # nothing to do before then: a policy waits for company
        self._flying: deque[Flight] = deque()
        self._deadlines = Deadlines()
        self._undone: dict[Request, None] = {}  # of a step that failed just now
        self._stepping = False
        self._steps = itertools.count()
        self._barren = 0  # steps in a row that planned nothing although requests are there

    @property
    def has_work(self) -> bool:
        """Requests are unanswered or steps in flight."""
        return bool(self.requests or self._flying or self.answers)

    @property
    def plans_in_flight(self) -> list[BatchPlan]:
        """Of steps that are not over, the oldest first."""
        return [flight.plan for flight in self._flying]

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: Seq[int],
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        prompt_text: str | None = None,
        priority: int | None = None,
        class_name: str = "default",
        user: str = "",
        stream: bool = False,
    ) -> Request:
        """Take a request of token ids; it waits for the scheduler. Raises RequestError, and then nothing has changed.

        `stream`: pieces after each step instead of one answer at the end. Priority: lower is sooner, without effect under
        `order = fcfs`; None: what `params` say. `max_tokens = None` means the rest of the context.
        """
        request = make_request(
            self,
            prompt,
            params,
            order=self.num_taken,
            request_id=request_id,
            prompt_text=prompt_text,
            priority=priority,
            class_name=class_name,
            user=user,
            stream=stream,
        )
        check_request(request, self)
        if request.params.structured_outputs is not None and self.grammars is not None:
            request.sequences[0].grammar = self.grammars.compile(request.params.structured_outputs).matcher()
        if not request.beam_width:
            self.answers.begin(request.sequences[0])
        self.scheduler.add(request)
        self.requests[request.id] = request
        self._deadlines.add(request)
        self.num_taken += 1
        return request

    def abort(self, request_id: str) -> None:
        """End a request now; its KV goes back at once. Unknown and ended ids are fine."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, "abort")

    def discard(self, request_id: str) -> None:
        """Nobody will ask for what came out for this request."""
        self.answers.discard(request_id)

    # ---------------------------------------------------------------------- step

    def step(self) -> list[RequestOutput]:
        """Plan the next step, start it, and apply the oldest one in flight. Returns what became ready to hand out.

        A step for which device memory ran out is undone, and the next one is smaller; it fails a request only where nothing helps.
        What else goes wrong is raised; the step is undone, and the engine can go on: see `fail_undone`.
        """
        if self._stepping:
            raise EngineError("a step runs already: step() was called by an observer or a logits processor")
        try:
            self._stepping = True
            return self._step()
        finally:
            self._stepping = False

    def _step(self) -> list[RequestOutput]:
        started = self.clock.now()
        self._undone.clear()
        for request in self._deadlines.expired(started):
            self._end(request, "timeout")  # with what it has
        try:
            self._advance(started)
        except OutOfMemoryError as error:
            if not self.relief.shrink():
                self.fail_undone(error)
        if self.debug:
            check_books(self.scheduler, self.kv, self.requests.values())
        return self.answers.drain()

    def _advance(self, started: float) -> None:
        plan = self.scheduler.schedule(started)
        if not isinstance(plan, BatchPlan):
            raise PluginContractError(f"{type(self.scheduler).__name__}.schedule returned {plan!r:.60}, not what PlanBuilder.build makes")
        flight = Flight(next(self._steps), plan, None, started, seconds={"schedule": self.clock.now() - started})
        for request, error in plan.failed:
            self._end(request, "error", error)
        if plan:
            self._submit(flight)
        else:
            if not self._flying:
                self._check_progress(plan)
            if plan.preempted or plan.failed:
                self._tell(flight)  # nothing to run, hence no result to wait for
        self.wait_until = self._wake_up(plan) if not plan and not self._flying else None
        if self._flying and (not plan or len(self._flying) >= self.depth):
            oldest = self._flying.popleft()
            self._finish_step(oldest)
            self._tell(oldest)
            self.relief.went_well()

    def fail_undone(self, error: Exception) -> None:
        """End the requests of the step that failed last, or all that run if it failed before it was planned; others go on."""
        for request in self._undone or list(self.scheduler.running) or list(self.scheduler.waiting):
            if self.requests.get(request.id) is request:
                self._end(request, "error", f"its step failed: {error}")

    def _wake_up(self, plan: BatchPlan) -> float | None:
        """Until when nothing is to be done: the policy's own time, or the next request's to end, whichever comes first."""
        first = self._deadlines.first
        return plan.wait_until if plan.wait_until is None or first is None else min(plan.wait_until, first)

    def _submit(self, flight: Flight) -> None:
        self._barren = 0
        for chunk in flight.plan.chunks:
            if chunk.sequence.request.first_scheduled is None:
                chunk.sequence.request.first_scheduled = flight.started
        self.reports.planned(flight)
        self._flying.append(flight)
        try:
            flight.handle = self.runner.submit(flight.plan)
        except BaseException as error:
            self._rollback(error)
            raise

    def _finish_step(self, flight: Flight) -> None:
        """Wait for a step and apply it. If either fails, it and all behind it are undone as far as they were not applied."""
        try:
            if flight.handle is None:
                raise PluginContractError("a step was applied before it was submitted")
            result = flight.handle.result()
            begun = self.clock.now()
            self.token_times.begin(begun)
            self._apply(flight, result)
            flight.ended = self.clock.now()
            flight.seconds.update(result.seconds, apply=flight.ended - begun)
        except BaseException as error:
            self._flying.appendleft(flight)
            self._rollback(error)
            raise

    def _apply(self, flight: Flight, result: StepResult) -> None:
        """Bring a step's result into the sequences: append, count, commit, and end or split those whose turn it is."""
        kv, commit, note, append = self.kv, self.kv.commit, self.token_times.note, self.answers.append
        errors, ended, logprobs, beams = result.errors, result.ended, result.logprobs, dict[Request, Rows]()
        timed = self.observers.wanted("step_finished")  # somebody wants to know when each token came
        for index, (chunk, tokens) in enumerate(zip(flight.plan.chunks, result.tokens, strict=True)):
            sequence = chunk.sequence
            if chunk.epoch != sequence.epoch:
                continue  # finished, aborted or preempted meanwhile
            request = sequence.request
            if sequence.awaited is chunk:
                sequence.awaited = None
            if index in errors:
                beams.pop(request, None)
                self._end(request, "error", errors[index])
                continue
            computed = chunk.start + chunk.length
            if index in result.prompt_logprobs:
                request.score_prompt(result.prompt_logprobs[index])
            if chunk.drafts:
                flight.num_accepted += len(tokens) - 1
                rejected = len(chunk.drafts) + 1 - len(tokens)
                computed -= rejected
                sequence.num_scheduled -= rejected
            joint = request.samples_jointly
            scored = logprobs.get(index, ()) if logprobs else ()
            reason = None
            if index in ended:
                reason = "stop"
                self.answers.cut_short(sequence, reason)
            elif chunk.samples and not joint:
                if timed or request.first_token is None:
                    note(sequence)
                reason = append(sequence, tokens, scored)
            sequence.num_computed = computed
            commit(sequence, computed if joint else min(computed, sequence.num_tokens - 1))
            if reason is not None:
                self._finish(sequence, reason)
            elif joint and chunk.samples and request.beam_width:
                beams.setdefault(request, []).append((sequence, result.candidates[index]))
            elif joint and chunk.samples:
                self._split(sequence, tokens, scored)
        for request, rows in beams.items():
            if request.first_token is None:
                self.token_times.begun(request)
            if advance_beams(kv, request, rows, drop=self._drop):
                self._complete(request)

    def _split(self, lead: Sequence, tokens: Seq[int], scored: Seq[TokenLogprobs]) -> None:
        """n samples of one row of logits: the lead goes on, the others fork from it."""
        family = split(self.kv, lead)
        for number, (sequence, token) in enumerate(zip(family, tokens, strict=True)):
            if sequence.text is None:
                self.answers.begin(sequence)
            self.token_times.note(sequence)
            reason = self.answers.append(sequence, (token,), scored[number : number + 1])
            if reason is not None:
                self._finish(sequence, reason)

    # ----------------------------------------------------------------------- end

    def _drop(self, sequence: Sequence) -> None:
        """A sequence is over and nobody wants its result."""
        held = sequence.status in (Status.OPEN, Status.SUSPENDED)
        sequence.request.sequences.remove(sequence)
        sequence.new_epoch(Status.DONE)
        if held:
            self.kv.close(sequence)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """A sequence ended by itself; the policy decides when its KV goes."""
        request = sequence.request
        request.sequences.remove(sequence)
        sequence.new_epoch(Status.DONE)
        sequence.finish_reason = reason
        request.finished.append(sequence)
        self.scheduler.finished(sequence)
        if not request.sequences:
            self._complete(request)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End all that is left of a request, aborted or failed; its KV goes back at once."""
        if not request.beam_width:
            request.sequences += unborn(request)  # n outputs, however early it ends
        for sequence in list(request.sequences):
            self._drop(sequence)
            sequence.finish_reason, sequence.error = reason, error
            request.finished.append(sequence)
            self.answers.cut_short(sequence, reason)
        self._complete(request)

    def _complete(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._deadlines.drop(request)
        del self.requests[request.id]
        answer = self.answers.complete(request, finished_at=self.clock.now())
        self.observers.tell("request_finished", answer)

    # -------------------------------------------------------------------- trouble

    def _rollback(self, error: BaseException) -> None:
        """A step failed: undo it and all that were planned on top of it, the newest first. Then the engine can go on."""
        undone = [self._flying.pop() for _ in range(len(self._flying))]
        for flight in undone:
            self._undone.update(dict.fromkeys(chunk.sequence.request for chunk in flight.plan.chunks))
            for chunk in flight.plan.chunks:
                sequence = chunk.sequence
                if chunk.epoch == sequence.epoch:
                    # one token at least is computed again where the step's own was not taken yet
                    sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
                    sequence.num_scheduled = sequence.num_computed
                    sequence.awaited = None
            done = flight.handle.transfers_done if flight.handle is not None else 0
            self.kv.requeue(flight.plan.transfers[done:])
        self.runner.forget()
        for flight in reversed(undone):
            self._tell(flight, f"{type(error).__name__}: {error}")

    def _check_progress(self, plan: BatchPlan) -> None:
        """Nothing is planned and nothing in flight: fine if somebody just left or the policy waits on purpose."""
        if not self.requests or (plan.wait_until is not None and self.clock.now() < plan.wait_until < math.inf):
            return
        self._barren += 1
        if plan.failed or (plan.preempted and self._barren <= 2 * len(self.requests) + 8):
            return
        scheduler, kv = self.scheduler, self.kv
        raise EngineStuckError(
            f"{type(scheduler).__name__} planned nothing although {len(scheduler.waiting)} requests wait and "
            f"{len(scheduler.running)} run, and nothing is in flight; {type(kv).__name__} holds {kv.usage()} of {kv.capacity} slots"
        )

    def _tell(self, flight: Flight, error: str = "") -> None:
        """Report a step that is over to whoever listens."""
        self.reports.tell(flight, ended=self.clock.now() if flight.ended is None else flight.ended, error=error)

    def close(self) -> None:
        """Abort everything and give device memory back."""
        for request_id in list(self.requests):
            self.abort(request_id)
        self._flying.clear()
        self.answers.drain()
        self.runner.close()
        if self.grammars is not None:
            self.grammars.close()

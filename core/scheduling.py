"""What a scheduler is: policy over requests. Rank, limits, admission and preemption live here, so that a policy is a few lines.

A subclass writes `schedule`: it calls `self.plan()`, then `grow` for running requests and `admit` for waiting ones in the order it
likes, and returns `plan.build()`. Must not know: tokens' values, tensors, how an allocator works.

Promises of the base: every live request is in exactly one of `waiting` and `running`, both sorted by rank; the last in rank is
preempted first and the first never for others, so somebody always gets on; a request is admitted only when its whole prompt fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import ClassVar

from octavo.core.errors import PluginContractError, QueueFullError, RequestError
from octavo.core.forks import common_prefix
from octavo.core.kv import Allocator
from octavo.core.options import SchedulerOptions
from octavo.core.plan import BatchPlan
from octavo.core.plan_builder import PlanBuilder, Proposer
from octavo.core.request import Request, Sequence, Status

_by_rank = attrgetter("rank")


class Scheduler(ABC):
    """Decides what runs in the next step."""

    chunking: ClassVar[bool] = False  # a prompt may be cut into pieces

    def __init__(self, options: SchedulerOptions, kv: Allocator, *, proposer: Proposer | None = None) -> None:
        self.options = options
        self.kv = kv
        self.waiting: list[Request] = []
        self.num_preemptions = 0  # since the start
        self.running: list[Request] = []
        self.proposer = proposer  # guesses next tokens for every plan; may be set later, which is how an engine's config does it
        self.max_num_seqs = options.max_num_seqs  # these two may be lower for a while, where device memory ran out
        self.budget = options.max_num_batched_tokens or options.max_num_seqs

    @abstractmethod
    def schedule(self, now: float) -> BatchPlan:
        """The next step's plan. `now` is the engine's clock, in seconds."""

    def plan(self) -> PlanBuilder:
        """An empty plan with this step's token budget. Whoever has no seat any more is preempted first."""
        plan = PlanBuilder(self.kv, budget=self.budget, chunking=self.chunking, proposer=self.proposer)
        if self.max_num_seqs < self.options.max_num_seqs:  # device memory ran out, see octavo.core.relief
            while len(self.running) > 1 and self._seats_taken() > self.max_num_seqs:
                self.preempt(plan, self.running[-1])
        return plan

    def _seats_taken(self) -> int:
        return sum(request.seats for request in self.running)

    def rank(self, request: Request) -> tuple[float, int]:
        """What the lists are sorted by; lower is sooner.

        A level of priority is worth `ageing` seconds of waiting. The rank never changes, and whoever came more than
        levels x ageing seconds later is behind, whatever its priority: nobody waits for ever.
        """
        head_start = self.options.ageing * request.priority if self.options.order == "priority" else 0.0
        return (request.arrival + head_start, request.order)

    def check(self, request: Request) -> None:
        """Refuse at submit what its class does not allow or what no batch could hold. Raises RequestError."""
        longest = len(request.prompt) + request.max_tokens - 1  # a preempted request computes prompt and outputs again
        if not self.chunking and longest > self.budget:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens + max_tokens {request.max_tokens} make steps of up to {longest} tokens, "
                f"max_num_batched_tokens is {self.budget} and this scheduler runs prompts whole: ask for less or raise it",
                field="prompt",
            )
        limits, most = self.options.classes.get(request.class_name), self.options.max_num_seqs
        width = "beam_width" if request.beam_width else "n"
        if limits is None:
            if request.class_name != "default":
                known = ", ".join(sorted({"default", *self.options.classes}))
                raise RequestError(f"class {request.class_name!r} is not configured; known classes: {known}", field="class")
            if request.seats > most:
                raise RequestError(f"the request needs {request.seats} seats, max_num_seqs is {most}", field=width)
            return
        name, seats = request.class_name, min(most, limits.max_running or most)
        if request.seats > seats:
            raise RequestError(f"the request needs {request.seats} seats, class {name!r} may run {seats}", field=width)
        if limits.max_input_tokens is not None and len(request.prompt) > limits.max_input_tokens:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens, class {name!r} allows max_input_tokens = {limits.max_input_tokens}",
                field="prompt",
            )
        if limits.max_output_tokens is not None and request.max_tokens > limits.max_output_tokens:
            raise RequestError(
                f"max_tokens is {request.max_tokens}, class {name!r} allows max_output_tokens = {limits.max_output_tokens}",
                field="max_tokens",
            )
        if limits.max_queue is not None:
            queued = sum(other.class_name == name for other in self.waiting)
            if queued >= limits.max_queue:
                raise QueueFullError(f"{queued} requests of class {name!r} wait already, max_queue is {limits.max_queue}: try again later")

    def add(self, request: Request) -> None:
        """A new request waits."""
        request.rank = self.rank(request)
        insort(self.waiting, request, key=_by_rank)

    def queue(self) -> Iterator[Request]:
        """Waiting requests in rank order, without classes at their running limit. They may be admitted on the way.

        Within a class nobody overtakes one that its limit holds back, or a wide request would wait for ever behind narrow ones.
        """
        index, held_back = 0, set[str]()
        while index < len(self.waiting):
            request = self.waiting[index]
            if request.class_name not in held_back:
                if self._class_has_room(request):
                    yield request
                else:
                    held_back.add(request.class_name)
            if index < len(self.waiting) and self.waiting[index] is request:
                index += 1

    def candidates(self, plan: PlanBuilder, limit: int | None = None, *, kept: list[Request] | None = None) -> Iterator[Request]:
        """The queue without those that do better to wait until a running request has computed a prefix which they share.

        These are in `kept`. What they need stays free for them: seats, places of a class, and the pool, to the end of all that run.
        `limit`: tokens of a prompt that a step runs at most, where the policy has such a limit.
        """
        kept = [] if kept is None else kept
        free = self.max_num_seqs - self._seats_taken()
        for request in self.queue():
            limits = self.options.classes.get(request.class_name)
            if kept and limits and limits.max_running is not None and any(one.class_name == request.class_name for one in kept):
                continue
            if self._does_better_later(plan, request, limit):
                kept.append(request)
                free -= request.seats
                if free <= 0:
                    return  # nobody could pass, however many wait
            elif kept and (request.seats > free or not self.kv.fits(*self.running, *kept, request)):
                return
            else:
                yield request
                free -= request.seats if request.running else 0

    def _does_better_later(self, plan: PlanBuilder, request: Request, limit: int | None) -> bool:
        """Waiting spares at least as many tokens as this plan could have computed of the rest of its prompt."""
        if any(sequence.status is Status.SUSPENDED for sequence in request.sequences):
            return False  # what it has computed is in host memory
        lead = request.sequences[0]
        first, stop = self.kv.coming(lead)
        most = plan.left if limit is None else min(plan.left, limit)
        return stop > first and stop - first >= min(most, lead.num_tokens - first) - (stop - first)

    def _class_has_room(self, request: Request) -> bool:
        limits = self.options.classes.get(request.class_name)
        if limits is None or limits.max_running is None:
            return True
        taken = sum(other.seats for other in self.running if other.class_name == request.class_name)
        return taken + request.seats <= limits.max_running

    def room(self, sequence: Sequence) -> int:
        """Positions that must fit at admission. Default: all tokens it has, so that it runs at least one step."""
        return sequence.num_tokens

    def admit(self, plan: PlanBuilder, request: Request) -> bool:
        """Move a waiting request to `running` if seats, its class, the pool and (where prompts run whole) the budget allow it.

        Never in a step that preempted somebody. A request that the pool refuses although nothing runs can never run: it is failed.
        """
        if request.running or not request.sequences:
            raise PluginContractError(
                f"request {request.id!r} was admitted but does not wait: it {'runs' if request.running else 'is over'}"
            )
        if plan.preempted or plan.left <= 0 or (self.running and self._seats_taken() + request.seats > self.max_num_seqs):
            return False
        if not self._class_has_room(request):
            return False
        while not self._enter(request, plan.left):
            if self.running:
                return False
            if not self.make_room():
                plan.fail(request, f"the KV pool cannot hold it although nothing else runs ({self.kv.usage()})")
                return False
        self.waiting.remove(request)
        request.running = True
        insort(self.running, request, key=_by_rank)
        return True

    def _enter(self, request: Request, budget: int) -> bool:
        """Open or resume what the request needs to run; False changes nothing.

        Where prompts run whole, what is not cached of this one must fit the step's budget, or it would hold slots and wait.
        """
        suspended = [s for s in request.sequences if s.status is Status.SUSPENDED]
        if suspended:
            counts = self.kv.resume(suspended)
            if counts is None:
                return False
            for sequence, count in zip(suspended, counts, strict=True):
                sequence.status = Status.OPEN
                sequence.num_computed = sequence.num_scheduled = count
            return True
        lead = request.sequences[0]
        hit = self.kv.open(lead)
        granted = False
        try:
            if hit and not request.reads_cache:
                raise PluginContractError(
                    f"{type(self.kv).__name__} found {hit} cached tokens for request {request.id!r}, which does not read the cache"
                )
            if self.chunking or lead.num_tokens - hit <= budget:
                granted = self.kv.reserve(lead, hit, max(lead.num_tokens, self.room(lead)))
        finally:
            if not granted:
                self.kv.close(lead)
        if not granted:
            return False
        lead.status = Status.OPEN
        lead.num_computed = lead.num_scheduled = hit
        if request.num_cached is None:
            request.num_cached = hit
        return True

    def preempt(self, plan: PlanBuilder, request: Request) -> None:
        """Take a running request off: its KV goes to host memory or is given up, and it waits at its old rank."""
        if not request.running:
            raise PluginContractError(f"request {request.id!r} was preempted but is not running")
        plan.drop(request)
        held = [s for s in request.sequences if s.status is Status.OPEN]
        if self.options.preemption == "swap" and held and self.kv.suspend(held):
            for sequence in held:
                sequence.new_epoch(Status.SUSPENDED)
        else:
            for sequence in held:
                self.kv.close(sequence)
                sequence.new_epoch(Status.NEW)
            if len(request.sequences) > 1:
                request.restore = common_prefix(request.sequences)
        self.running.remove(request)
        request.running = False
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)
        plan.preempted.append(request)

    def grow(self, plan: PlanBuilder, request: Request, limit: int | None = None) -> None:
        """Add a running request to the plan, preempting from the lowest rank until it fits; perhaps itself."""
        while request.running and not plan.add(request, limit):
            if self.make_room():
                continue
            if len(self.running) == 1:
                plan.fail(request, f"the KV pool cannot hold it alone ({self.kv.usage()})")
                return
            self.preempt(plan, self.running[-1])

    def make_room(self) -> bool:
        """Give back what the policy kept of ended sequences, before anybody is preempted. False: it kept nothing."""
        return False

    def finished(self, sequence: Sequence) -> None:
        """A sequence ended by itself. A policy may keep its KV until `make_room`; the default gives it back."""
        self.kv.close(sequence)

    def remove(self, request: Request) -> None:
        """The request is over and leaves its list."""
        (self.running if request.running else self.waiting).remove(request)
        request.running = False

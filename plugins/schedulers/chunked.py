"""Chunked prefill: prompts are cut to the step's token budget, so that a long one never holds up those that decode.

Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024): each step decodes first and spends what is left of
`max_num_batched_tokens` on pieces of prompts. Needs no torch, imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from octavo.core.descriptors import SchedulerPlugin
from octavo.core.hookspecs import hookimpl
from octavo.core.kv import Allocator
from octavo.core.options import SchedulerOptions
from octavo.core.plan import BatchPlan
from octavo.core.plan_builder import PlanBuilder, Proposer
from octavo.core.request import Request
from octavo.core.scheduling import Scheduler


class ChunkedOptions(SchedulerOptions):
    """Options of the chunked scheduler."""

    mixing: Literal["mixed", "prefill_first"] = Field(
        "mixed", description="a step decodes and gives prompts the rest of the budget, or runs prompts alone while decodes pause"
    )
    long_prefill_token_threshold: int | None = Field(
        None, ge=1, description="a prompt of more tokens is long and runs at most this many a step; unset: no prompt is long"
    )
    max_num_partial_prefills: int | None = Field(
        None, ge=1, description="most prompts that a step leaves unfinished; one that ends within its step may overtake; unset: no limit"
    )
    max_long_partial_prefills: int | None = Field(
        None, ge=1, description="most long prompts that a step leaves unfinished; shorter ones overtake; unset: no limit of their own"
    )

    @model_validator(mode="after")
    def _limits_have_an_effect(self) -> Self:
        long, most = self.max_long_partial_prefills, self.max_num_partial_prefills
        if long is not None and self.long_prefill_token_threshold is None:
            raise ValueError(f"max_long_partial_prefills = {long} limits long prompts: set long_prefill_token_threshold too")
        if long is not None and most is not None and long > most:
            raise ValueError(f"max_long_partial_prefills = {long} is more than max_num_partial_prefills = {most}")
        return self


class Chunked(Scheduler):
    """Decodes first, then the prompts in progress, then new ones, as far as the budget goes."""

    chunking: ClassVar[bool] = True

    def __init__(self, options: ChunkedOptions, kv: Allocator, *, proposer: Proposer | None = None) -> None:
        super().__init__(options, kv, proposer=proposer)
        self._mixes = options.mixing == "mixed"
        self._threshold = options.long_prefill_token_threshold
        self._most = options.max_num_partial_prefills or self.max_num_seqs
        self._most_long = options.max_long_partial_prefills or self._most
        self._is_limited = options.max_num_partial_prefills is not None or options.max_long_partial_prefills is not None

    def schedule(self, now: float) -> BatchPlan:
        """Mixed: decodes, then pieces of prompts. Prefill first: pieces of prompts, decodes only if there are none."""
        plan = self.plan()
        prompts = [request for request in self.running if request.prefilling]
        decodes = [request for request in self.running if not request.prefilling] if prompts else list(self.running)
        if self._mixes:
            self._decode(plan, decodes)
        for request in prompts:
            self.grow(plan, request, self._threshold)
        for request in self._limited(plan, prompts) if self._is_limited else self.candidates(plan, self._threshold):
            if not self.admit(plan, request):
                break
            self.grow(plan, request, self._threshold)
        if not self._mixes and not len(plan):
            self._decode(plan, decodes)
        return plan.build()

    def _decode(self, plan: PlanBuilder, requests: list[Request]) -> None:
        for request in requests:
            self.grow(plan, request)

    def _limited(self, plan: PlanBuilder, prompts: list[Request]) -> Iterator[Request]:
        """The candidates without prompts that the limits keep from starting; these are first again in the next step.

        How much of a prompt is cached shows at admission only, so that until then its whole length counts.
        """
        unfinished = [request for request in prompts if request.running and plan.rest(request)]
        kept: list[Request] = []  # they start as soon as what they wait for is there, and their places are taken
        num_long = sum(map(self._is_long, unfinished))
        for request in self.candidates(plan, self._threshold, kept=kept):
            is_long = self._is_long(request)
            ends_now = not is_long and request.sequences[0].num_tokens <= plan.left
            num_places, num_long_places = len(unfinished) + len(kept), num_long + sum(map(self._is_long, kept))
            if not ends_now and (num_places >= self._most or (is_long and num_long_places >= self._most_long)):
                continue
            yield request
            if request.running and plan.rest(request):
                unfinished.append(request)
                num_long += is_long

    def _is_long(self, request: Request) -> bool:
        return self._threshold is not None and request.sequences[0].num_tokens > self._threshold


def _build(options: ChunkedOptions, kv: Allocator) -> Scheduler:
    return Chunked(options, kv)


CHUNKED = SchedulerPlugin(
    name="chunked",
    summary="decodes first, then pieces of prompts as far as the budget goes",
    options=ChunkedOptions,
    build=_build,
    chunking=True,
    preference=20,
)


@hookimpl
def octavo_schedulers() -> Iterable[SchedulerPlugin]:
    """This module's scheduler."""
    return [CHUNKED]

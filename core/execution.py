"""How a plan is executed: a `Runner` takes it, a `Handle` brings the result. The engine knows no more of devices than this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from octavo.core.beam_search import Candidate
from octavo.core.logprobs import TokenLogprobs
from octavo.core.plan import BatchPlan


@dataclass(slots=True)
class StepResult:
    """What a step produced, aligned with the plan's chunks."""

    tokens: Seq[Seq[int]]
    """Sampled ids of each chunk: none, one, accepted drafts and one more, or the first tokens of all n samples."""
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    """For chunks of beams, by index: the likeliest `Request.num_candidates` tokens at least, with their log probabilities."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """For chunks whose requests ask, by index: one for each of `tokens`."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """For chunks of prompts whose log probabilities are wanted, by index: of the tokens behind the positions from `logits_from` to
    where sampling begins."""
    ended: set[int] = field(default_factory=set)
    """Chunks whose sequences are complete as they are and can go on no further, by index: they have no token."""
    errors: dict[int, str] = field(default_factory=dict)
    """Chunks that have no result, by index, and why: their requests fail, all others go on."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of the step's parts: inputs, forward, sample."""


class Handle(Protocol):
    """A step in flight."""

    transfers_done: int  # so many of the plan's transfers were applied, the first ones, whatever became of the rest

    def result(self) -> StepResult:
        """Wait for the step. Raises what went wrong in it."""


class Runner(ABC):
    """Executes plans in the order in which they are submitted."""

    @abstractmethod
    def submit(self, plan: BatchPlan) -> Handle:
        """Take a snapshot of all that the step needs and start it.

        Raises only before any of the plan's transfers was applied; later errors come from `Handle.result`. After a step that failed
        nothing of those in flight behind it happens, transfers included, until `forget`: they would overtake what must be repeated.
        """

    def forget(self) -> None:
        """Steps in flight were rolled back: drop whatever is remembered of them."""

    def close(self) -> None:
        """Give device memory back."""

"""The plan of one step: frozen data that a scheduler hands to the engine and a runner executes.

Entries are snapshots: what the host changes after `PlanBuilder.build` does not change a plan in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.core.request import Request, Sequence


class Chunk(NamedTuple):
    """Run `length` tokens of a sequence from position `start`.

    Prefill, a piece of it, decode, resumption after preemption and the check of drafts are all this one case.
    """

    sequence: Sequence
    start: int
    length: int
    logits_from: int  # first position whose logits are wanted, to sample or to score the prompt's next token; start + length: none
    samples: bool  # a token is sampled after the last position (before the drafts, if any)
    drafts: tuple[int, ...]  # guessed ids of the last len(drafts) positions
    epoch: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.length

    @property
    def sampled_from(self) -> int:
        """First position from whose logits a token is drawn; `stop`: none. Those from `logits_from` to here are only scored."""
        return self.start + self.length - (len(self.drafts) + 1 if self.samples else 0)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy `count` slots of every cache tensor: within the pool, out to host memory, or back in.

    Applied before the forward pass, in list order; only disjoint neighbours may be fused.
    """

    kind: Literal["copy", "out", "in"]
    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one step does. `wait_until`: nothing to run before then, and that is intended (a batching window)."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[Request, ...] = ()
    failed: tuple[tuple[Request, str], ...] = ()
    transfers: tuple[Transfer, ...] = ()
    wait_until: float | None = None
    dead_rows: int = 0  # rows of ended requests that a static batch still computes
    idle_rows: int = 0  # rows of the batch that produce nothing in this step, computed or not
    num_recomputed: int = 0  # tokens that were computed before, and lost in a preemption

    def __bool__(self) -> bool:
        """There is something for a runner to do."""
        return bool(self.chunks or self.transfers)

    @property
    def num_tokens(self) -> int:
        """Tokens that run in this step."""
        return sum(chunk.length for chunk in self.chunks)

"""Where the KV pool's slots were during a run, and how much of it was of use, from a step log alone.

A slot is at any time one of six: it holds a token that a live sequence attends over (`token_states`); it is held and will be written by
the request that holds it (`reserved`); it is held and never written (`internal`); it is free but of no use (`external`: in a run too
short for the region that was refused, or lost to rounding); nobody's, but kept for reuse (`cached`); or `free`. The names are those of
the PagedAttention paper's Fig. 2. Nobody knows while a request runs which of its slots it will write. When a block is given back, it
says how many of its slots were; then all that it was held without is internal waste, from when it was taken.

Shares are means over the steps, weighted by how long each took. A step counts as the pool was while it ran, and the slots that it
writes as token states. Must not know: engines, allocators, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from octavo.bench.step_log import StepLine
from octavo.core.kv import BlockEvent

SHARES = ("token_states", "reserved", "internal", "external", "cached", "free")
Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShares:
    """Percent of the pool, time-weighted; they sum to 100."""

    token_states: float
    reserved: float
    internal: float
    external: float
    cached: float
    free: float

    @property
    def total(self) -> float:
        """100, or the account is wrong."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSavings:
    """What a prefix cache spared a run. Of first admissions only: what a preempted request finds again is no saving."""

    queried_tokens: int
    hit_tokens: int
    evictions: int
    seconds: float  # that computing the hit tokens would have taken, at the pace of the steps that computed prompts

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens looked up that were found."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVAccount:
    """A run's account. `series` has an entry a step: slots by share, which sum to `capacity`."""

    capacity: int
    shares: KVShares
    series: dict[str, Slots]
    saved_slots: float  # mean number of slots that live sequences would have held besides if they shared none
    share_saved: float  # of what they would have held then
    copies: int  # blocks or regions copied because a shared one was to be written
    transfers: dict[str, int]  # slots moved, by kind
    host_slots_peak: int
    num_preempted: int
    num_recomputed: int
    prefix: PrefixSavings
    overdrawn: Slots  # in each step, slots written or given back unwritten beyond those that were held; 0, or the log contradicts itself
    undecided: int  # blocks still held at the log's end; what they had empty then counts as reserved


def account(steps: Sequence[StepLine]) -> KVAccount:
    """The account of a log. Raises ValueError if it has no step, or if the pool changed its size within."""
    if not steps:
        raise ValueError("no step was logged, so that there is nothing to account for")
    usages = [line.usage_running for line in steps]
    filled, held, external, cached, free, saved, written = np.array(
        [(u.filled, u.held, u.external, u.cached, u.free, u.saved, line.num_written) for u, line in zip(usages, steps, strict=True)],
        dtype=np.int64,
    ).T
    sizes = filled + held + external + cached + free
    capacity = int(sizes[0])
    if (sizes != capacity).any():
        raise ValueError(f"the pool has {capacity} slots in the first step and {sorted(set(sizes.tolist()))} in the others")
    never, undecided = _never_written(steps)
    overdrawn = np.maximum(0, written + never - held)
    written = np.minimum(written, held)
    internal = np.minimum(never, held - written)
    series = {
        "token_states": filled + written,
        "reserved": held - written - internal,
        "internal": internal,
        "external": external,
        "cached": cached,
        "free": free,
    }
    weights = _weights(steps)
    saved_slots, live = float(weights @ saved), float(weights @ (filled + held + saved))
    stats = steps[-1].stats
    transfers: dict[str, int] = {}
    for line in steps:
        for kind, count in line.transfers.items():
            transfers[kind] = transfers.get(kind, 0) + count
    return KVAccount(
        capacity=capacity,
        shares=KVShares(**{name: 100 * float(weights @ series[name]) / capacity for name in SHARES}),
        series=series,
        saved_slots=saved_slots,
        share_saved=saved_slots / live if live else 0.0,
        copies=stats.copies,
        transfers=transfers,
        host_slots_peak=max(usage.host for usage in usages),
        num_preempted=sum(line.num_preempted for line in steps),
        num_recomputed=sum(line.num_recomputed for line in steps),
        prefix=PrefixSavings(
            queried_tokens=stats.queried_tokens,
            hit_tokens=stats.hit_tokens,
            evictions=stats.evictions,
            seconds=stats.hit_tokens * seconds_per_prompt_token(steps),
        ),
        overdrawn=overdrawn,
        undecided=undecided,
    )


def _weights(steps: Sequence[StepLine]) -> npt.NDArray[np.float64]:
    """Each step's share of the time of all; equal ones on a clock that stood still."""
    lengths = np.array([line.end - line.start for line in steps])
    total = lengths.sum()
    return lengths / total if total > 0 else np.full(len(steps), 1 / len(steps))


def seconds_per_prompt_token(steps: Sequence[StepLine]) -> float:
    """Forward pass of the steps that computed prompts, by their tokens; rows that decoded beside them are in it. 0 if there were none."""
    prompts = [line for line in steps if line.computes_prompt]
    tokens = sum(line.num_tokens for line in prompts)
    return sum(line.seconds.get("forward", 0.0) for line in prompts) / tokens if tokens else 0.0


# ---------------------------------------------------------------------------- blocks


@dataclass(slots=True)
class _Tenure:
    """A block from when it was taken to when the last holder gave it back: steps `begin` .. `end` - 1 ran with it held."""

    begin: int
    count: int
    num_holders: int = 0
    end: int | None = None
    filled: int = 0  # when it was given back
    owner: str = ""  # the last one
    given_at: int = 0  # running number of the event that ended it
    next: _Tenure | None = None  # it stayed with its request


def _never_written(steps: Sequence[StepLine]) -> tuple[Slots, int]:
    """For each step, slots that were held and are given back unwritten; and how many blocks were not given back by the end."""
    changes = np.zeros(len(steps) + 1, dtype=np.int64)
    live: dict[int, _Tenure] = {}
    tenures: list[_Tenure] = []
    ended: dict[int, _Tenure] = {}  # the last one of each block
    number = 0
    for index, line in enumerate(steps):
        for position, event in enumerate(line.events):
            number += 1
            runs_from = index if position < line.num_events_planned else index + 1
            tenure = live.get(event.start)
            if event.kind == "taken":
                if tenure is None:
                    tenure = live[event.start] = _Tenure(runs_from, event.count)
                    tenures.append(tenure)
                    before = ended.get(event.start)
                    if before is not None and before.given_at == number - 1 and _passed_on(before, event):
                        before.next = tenure
                tenure.num_holders += 1
            elif event.kind == "released":
                if tenure is None:  # held before the log began
                    tenure = live[event.start] = _Tenure(0, event.count, num_holders=1)
                    tenures.append(tenure)
                tenure.num_holders -= 1
                tenure.filled = max(tenure.filled, event.filled)
                if not tenure.num_holders:
                    tenure.end, tenure.owner, tenure.given_at = runs_from, event.owner, number
                    ended[event.start] = live.pop(event.start)
    for tenure in reversed(tenures):  # who got it next, first
        if tenure.end is None:
            continue
        if tenure.next is not None:
            tenure.filled = max(tenure.filled, tenure.count if tenure.next.end is None else tenure.next.filled)
        changes[tenure.begin] += tenure.count - tenure.filled
        changes[tenure.end] -= tenure.count - tenure.filled
    return np.cumsum(changes[:-1]), len(live)


def _passed_on(before: _Tenure, event: BlockEvent) -> bool:
    """A region went from its request to one of its sequences, or back: between the two nobody else could have had it."""
    one, other = sorted((before.owner, event.owner), key=len)
    return other.startswith(f"{one}/")

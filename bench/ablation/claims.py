"""What a specification says must come out, and whether it did.

A claim about a ratio holds where the whole interval is on the right side of its bound, and fails where the whole interval is on the wrong
one; in between nothing is decided. `of_bound` claims a share of what reusing a prefix could have saved at most.
Must not know: engines, plugins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.spec import ClaimSpec
from octavo.bench.ablation.summary import gaps_with_prefill
from octavo.bench.intervals import Interval
from octavo.bench.runs import Run

Outcome = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim and what became of it."""

    claim: ClaimSpec
    outcome: Outcome
    found: str  # the figures


def judge(result: AblationResult) -> list[Judged]:
    """Every claim of the specification, in order."""
    return [_judge(result, claim) for claim in result.spec.claims]


def _judge(result: AblationResult, claim: ClaimSpec) -> Judged:
    of = next(
        (one for one in result.comparisons(claim.scenario, measures=[claim.measure]) if one.cell == claim.cell),
        None,
    )
    if of is None or of.interval is None:
        return Judged(claim=claim, outcome="undecided", found=of.problem if of else "that cell did not run")
    interval, found = of.interval, str(of.interval)
    if claim.of_bound:
        bound = prefix_bound(result.of(claim.scenario, of.parent), result.of(claim.scenario, claim.cell))
        interval = Interval(interval.ratio / bound, interval.low / bound, interval.high / bound)
        found = f"{found}, of at most {bound:.2f}x: {interval}"
    if claim.prefill_gaps_at_least is not None:
        share = gaps_with_prefill(result.of(claim.scenario, of.parent))
        found += f"; prompts run in {100 * share:.1f} % of {of.parent}'s gaps"
        if share < claim.prefill_gaps_at_least:
            return Judged(claim=claim, outcome="undecided", found=f"{found}, which is less than the claim is about")
    return Judged(claim=claim, outcome=_outcome(interval, claim), found=found)


def _outcome(interval: Interval, claim: ClaimSpec) -> Outcome:
    least = -math.inf if claim.at_least is None else claim.at_least
    most = math.inf if claim.at_most is None else claim.at_most
    if least <= interval.low and interval.high <= most:
        return "holds"
    return "fails" if interval.high < least or interval.low > most else "undecided"


def prefix_bound(cold: Sequence[Run], warm: Sequence[Run]) -> float:
    """The most by which the hits of `warm` could have sped up `cold`: its duration over what is left without these tokens' prefill.

    Their prefill is priced at the cold runs' own pace: forward passes of steps that computed prompts, by token. Rows that decode beside
    them are in it, and tokens deep in a context, which cost more than those of a prefix. 1 where nothing was hit.
    """
    bounds = []
    for one, other in zip(cold, warm, strict=False):
        prompts = [line for line in one.steps if line.num_tokens > line.num_rows]
        tokens, seconds = sum(line.num_tokens for line in prompts), sum(line.seconds.get("forward", 0.0) for line in prompts)
        duration = max(record.ended for record in one.records)
        saved = sum(record.num_cached_tokens for record in other.records) * seconds / tokens if tokens else 0.0
        bounds.append(duration / (duration - saved) if saved < duration else math.inf)
    return median(bounds) if bounds else 1.0


def headline(claim: ClaimSpec) -> str:
    """The claim in words."""
    bounds = [f"{word} {value:g}" for word, value in (("at least", claim.at_least), ("at most", claim.at_most)) if value is not None]
    unit = " of what the hits allow" if claim.of_bound else "x"
    return f"{claim.scenario}: {claim.cell} has {' and '.join(bounds)}{unit} its parent's {claim.measure}"

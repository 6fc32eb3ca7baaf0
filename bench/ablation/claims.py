"""What a specification says must come out, and whether it did.

A claim about a ratio holds where the whole interval is on the right side of its bound, and fails where the whole interval is on the wrong
one; in between nothing is decided. `of_bound` claims a share of what reusing a prefix could have saved at most.
Must not know: engines, plugins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Literal

from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.spec import AblationSpec, ClaimSpec
from octavo.bench.ablation.summary import gaps_with_prefill
from octavo.bench.intervals import Interval, ratio_interval
from octavo.bench.runs import Run
from octavo.core.errors import InvalidOptionsError

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
        bounds, share = _of_bound(result, claim, of.parent)
        found += f", of at most {median(bounds):.2f}x"
        if share is None:
            return Judged(claim=claim, outcome="undecided", found=f"{found}: the hits are priced at more than a whole run")
        interval = share
        found += f": {interval}"
    if claim.prefill_gaps_at_least is not None:
        gaps = gaps_with_prefill(result.of(claim.scenario, of.parent))
        found += f"; prompts run in {100 * gaps:.1f} % of {of.parent}'s gaps"
        if gaps < claim.prefill_gaps_at_least:
            return Judged(claim=claim, outcome="undecided", found=f"{found}, which is less than the claim is about")
    return Judged(claim=claim, outcome=_outcome(interval, claim), found=found)


def _of_bound(result: AblationResult, claim: ClaimSpec, parent: str) -> tuple[list[float], Interval | None]:
    """The bound of each pair of repeats, and the ratio as a share of it, pair by pair; None where a bound is infinite."""
    measure = find_measure(claim.measure)
    warm, cold = (result.values(claim.scenario, cell, measure) for cell in (claim.cell, parent))
    pairs = result.pairs(claim.scenario, claim.cell, parent)
    bounds = [prefix_bound(*(result.runs[claim.scenario, cell, repeat] for cell in (parent, claim.cell))) for repeat in pairs]
    if not all(map(math.isfinite, bounds)):
        return bounds, None
    allowed = [cold[repeat] * bound for repeat, bound in zip(pairs, bounds, strict=True)]
    return bounds, ratio_interval([warm[repeat] for repeat in pairs], allowed, seed=result.spec.seed)


def check_claims(spec: AblationSpec) -> None:
    """Their measures. Raises InvalidOptionsError that names the one which is not known, or has no bound."""
    for claim in spec.claims:
        if not find_measure(claim.measure).higher_is_better and claim.of_bound:
            raise InvalidOptionsError(
                f"claims: of_bound is a share of the largest speed-up; {claim.measure!r} is a time, of which less is better: "
                "name a throughput, or leave of_bound out"
            )


def _outcome(interval: Interval, claim: ClaimSpec) -> Outcome:
    least = -math.inf if claim.at_least is None else claim.at_least
    most = math.inf if claim.at_most is None else claim.at_most
    if least <= interval.low and interval.high <= most:
        return "holds"
    return "fails" if interval.high < least or interval.low > most else "undecided"


def prefix_bound(cold: Run, warm: Run) -> float:
    """The most by which the hits of `warm` could have sped up `cold`: its duration over what is left without these tokens' prefill.

    Both had the same work. The prefill is priced at the cold run's own pace: forward passes of steps that computed prompts, by token. Rows
    that decode beside them are in it, and tokens deep in a context, which cost more than those of a prefix. 1 where nothing was hit.
    """
    prompts = [line for line in cold.steps if line.computes_prompt]
    tokens, seconds = sum(line.num_tokens for line in prompts), sum(line.seconds.get("forward", 0.0) for line in prompts)
    duration = max(record.ended for record in cold.records)
    saved = sum(record.num_cached_tokens for record in warm.records) * seconds / tokens if tokens else 0.0
    return duration / (duration - saved) if saved < duration else math.inf


def headline(claim: ClaimSpec) -> str:
    """The claim in words."""
    bounds = [f"{word} {value:g}" for word, value in (("at least", claim.at_least), ("at most", claim.at_most)) if value is not None]
    unit = " of what the hits allow" if claim.of_bound else "x"
    return f"{claim.scenario}: {claim.cell} has {' and '.join(bounds)}{unit} its parent's {claim.measure}"

"""What a specification says must come out, and whether it did.

A claim about a ratio holds where the whole interval is on the right side of its bound, and fails where the whole interval is on the wrong
one; in between nothing is decided. `of_bound` claims a share of what reusing a prefix could have saved at most; `lost_at_most` bounds what
a part costs where it gains nothing: around forward passes, also where the ratio of whole runs is too noisy to say, and in whole runs, where
it is not.
Must not know: engines, plugins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.spec import AblationSpec, ClaimSpec
from octavo.bench.ablation.summary import gaps_with_prefill
from octavo.bench.intervals import Interval, mean_interval, ratio_interval
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
    if claim.lost_at_most is not None:
        return _judge_loss(result, claim, of.parent, interval, most=claim.lost_at_most)
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
    return Judged(claim=claim, outcome=_outcome(interval.low, interval.high, least=claim.at_least, most=claim.at_most), found=found)


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


def _judge_loss(result: AblationResult, claim: ClaimSpec, parent: str, ratio: Interval, *, most: float) -> Judged:
    """What the cell adds to the time outside of forward passes and sampling, as a share of its parent's whole run, pair by pair.

    Only where both ran the same steps: then the rest is the same work, and its noise would hide what is added. But where more is lost in
    whole runs whatever their noise, it is: a part may slow down the forward passes themselves.
    """
    found = str(ratio)
    if ratio.high < 1 - most if find_measure(claim.measure).higher_is_better else ratio.low > 1 + most:
        return Judged(claim=claim, outcome="fails", found=f"{found}: whole runs lose more than {100 * most:g} %")
    pairs = [
        tuple(result.runs[claim.scenario, cell, repeat] for cell in (parent, claim.cell))
        for repeat in result.pairs(claim.scenario, claim.cell, parent)
    ]
    if any(_shapes(cold) != _shapes(warm) for cold, warm in pairs):
        return Judged(claim=claim, outcome="undecided", found=f"{found}; its steps were others than {parent}'s: a loss can't be told apart")
    lost, low, high = mean_interval([(_outside(warm) - _outside(cold)) / _duration(cold) for cold, warm in pairs])
    found += f"; {100 * lost:.2f} % [{100 * low:.2f}, {100 * high:.2f}] added outside of forward passes"
    return Judged(claim=claim, outcome=_outcome(low, high, least=None, most=most), found=found)


def _shapes(run: Run) -> list[tuple[int, int, int]]:
    return [(line.num_rows, line.num_tokens, line.num_pairs) for line in run.steps]


def _duration(run: Run) -> float:
    return max(record.ended for record in run.records)


def _outside(run: Run) -> float:
    """Seconds of a run in which no model ran and nothing was sampled."""
    return _duration(run) - sum(line.seconds.get(part, 0.0) for line in run.steps for part in ("forward", "sample"))


def check_claims(spec: AblationSpec) -> None:
    """Their measures. Raises InvalidOptionsError that names the one which is not known, or has no bound."""
    for claim in spec.claims:
        if not find_measure(claim.measure).higher_is_better and claim.of_bound:
            raise InvalidOptionsError(
                f"claims: of_bound is a share of the largest speed-up; {claim.measure!r} is a time, of which less is better: "
                "name a throughput, or leave of_bound out"
            )


def _outcome(low: float, high: float, *, least: float | None, most: float | None) -> Outcome:
    """Of an interval; None is no bound."""
    least, most = -math.inf if least is None else least, math.inf if most is None else most
    if least <= low and high <= most:
        return "holds"
    return "fails" if high < least or low > most else "undecided"


def prefix_bound(cold: Run, warm: Run) -> float:
    """The most by which the hits of `warm` could have sped up `cold`: its duration over what is left without these tokens' prefill.

    Both had the same work. A cached token saves its linears, and the attention of one that sees few others, as it stands at the start of
    its prompt. Both are priced by the cold run's own steps that computed prompts: see `prefill_prices`. 1 where nothing was hit.
    """
    per_token, per_pair = prefill_prices(cold)
    cached = [record.num_cached_tokens for record in warm.records]
    saved = sum(per_token * count + per_pair * count * (count + 1) / 2 for count in cached)
    duration = _duration(cold)
    return duration / (duration - saved) if saved < duration else math.inf


def prefill_prices(run: Run) -> tuple[float, float]:
    """Seconds of forward pass for each token, and for each pair of query and key, of steps that computed prompts.

    Least squares over these steps: their sizes must differ for it, as where prompts are cut into pieces. Where they don't, or it finds a
    price below 0, tokens alone are priced, which makes those at the start of a prompt too dear. Rows that decode beside them are in it.
    """
    prompts = [line for line in run.steps if line.computes_prompt]
    if not prompts:
        return 0.0, 0.0
    sizes = np.array([(line.num_tokens, line.num_pairs) for line in prompts], float)
    seconds = np.array([line.seconds.get("forward", 0.0) for line in prompts])
    if len({tuple(size) for size in sizes.tolist()}) >= 3:
        prices = np.linalg.lstsq(sizes, seconds, rcond=None)[0]
        if (prices >= 0).all():
            return float(prices[0]), float(prices[1])
    return float(seconds.sum() / sizes[:, 0].sum()), 0.0


def headline(claim: ClaimSpec) -> str:
    """The claim in words."""
    if claim.lost_at_most is not None:
        return f"{claim.scenario}: {claim.cell} costs at most {100 * claim.lost_at_most:g} % of its parent's time where it gains nothing"
    bounds = [f"{word} {value:g}" for word, value in (("at least", claim.at_least), ("at most", claim.at_most)) if value is not None]
    unit = " of what the hits allow" if claim.of_bound else "x"
    return f"{claim.scenario}: {claim.cell} has {' and '.join(bounds)}{unit} its parent's {claim.measure}"

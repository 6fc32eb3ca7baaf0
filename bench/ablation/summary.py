"""A cell in figures: of its repeats, the median of each. For tables and reports.

Must not know: engines, how figures are printed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from statistics import median

from octavo.bench.distribution import Distribution
from octavo.bench.metrics import LATENCIES, Metrics, by_class, by_prompt_length, measure
from octavo.bench.runs import Run
from octavo.bench.stability import Stability, stability
from octavo.bench.step_log import StepLine

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    counts: tuple[int, ...]  # of values in each repeat, those that never came among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of all requests of a cell, of a class, or of a prompt length. Medians of the repeats."""

    requests: int  # in all repeats, those that failed too, and those of repeats that broke
    failed: int
    req_per_s: float
    output_tok_per_s: float
    total_tok_per_s: float
    latencies: dict[str, Latency]  # queue, ttft, tpot, itl, token_gap, e2el, normalized; of repeats that came to their end


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One cell in one scenario."""

    repeats: int
    speed: Speed
    by_class: dict[str, Speed]
    by_prompt_length: dict[str, Speed]
    failures: dict[str, int]  # by finish reason, in all repeats
    preemptions: int  # in all repeats
    evictions: int  # of blocks out of a prefix cache, in all repeats
    copies: int  # of blocks or regions that were shared when one was to be written, in all repeats
    recomputed: int  # tokens that a preemption lost, in all repeats
    prefix_seconds: float  # that computing the tokens found in a prefix cache would have taken, in all repeats
    hit_rate: float  # of all prompt tokens, the share found in a prefix cache
    mean_batch: float  # rows of a step
    peak_running: int  # requests at once, in any repeat
    mean_waiting: float  # requests in the queue, over time
    steps: float
    kv_shares: dict[str, float]  # of the pool over time, percent: token states, reserved, internal, external, cached, free
    kv_saved: float  # of the slots that live sequences would hold if they shared none, the share that they do not
    step_shares: dict[str, float]  # of the steps' time: schedule, inputs, forward, sample, apply
    step_seconds: dict[str, float]  # the same, in seconds of a step on average
    stability: Stability  # sums of the repeats, and the concurrency that was stable in all of them
    gaps_with_prefill: float  # share of the gaps between an answer's tokens in which a prompt was computed


def summarise(runs: Sequence[Run], *, lost: Sequence[Run] = ()) -> CellSummary:
    """Of a cell's repeats, and of those that broke, whose requests count as failed. Raises ValueError without a run."""
    if not runs:
        raise ValueError("a cell without a run has no figures")
    records = [record for run in runs for record in run.records]
    unanswered = [record for run in lost for record in run.records]
    steps = [line for run in runs for line in run.steps if line.num_rows]
    prompt_tokens = sum(record.num_prompt_tokens for record in records)
    stats = [run.steps[-1].stats for run in runs if run.steps]
    accounts = [account for run in runs if (account := run.accounted) is not None]
    spent = {name: sum(line.seconds.get(name, 0.0) for line in steps) for name in sorted({name for line in steps for name in line.seconds})}
    total_s = sum(spent.values())
    return CellSummary(
        repeats=len(runs),
        speed=_speed([measure(run.records) for run in runs], lost=len(unanswered)),
        by_class=_grouped([by_class(run.records) for run in runs], by_class(unanswered)),
        by_prompt_length=_grouped([by_prompt_length(run.records) for run in runs], by_prompt_length(unanswered)),
        failures=dict(Counter(record.finish_reason or "unanswered" for record in [*records, *unanswered] if not record.succeeded)),
        preemptions=sum(record.num_preemptions for record in records),
        evictions=sum(one.evictions for one in stats),
        copies=sum(one.copies for one in stats),
        recomputed=sum(line.num_recomputed for run in runs for line in run.steps),
        prefix_seconds=sum(one.prefix.seconds for one in accounts),
        hit_rate=sum(record.num_cached_tokens for record in records) / prompt_tokens if prompt_tokens else 0.0,
        mean_batch=sum(line.num_rows for line in steps) / len(steps) if steps else 0.0,
        peak_running=max((line.num_running for line in steps), default=0),
        mean_waiting=_over_time(steps, lambda line: line.num_waiting),
        steps=len(steps) / len(runs),
        kv_shares=_mean([asdict(one.shares) for one in accounts]),
        kv_saved=sum(one.share_saved for one in accounts) / len(accounts) if accounts else 0.0,
        step_shares={name: seconds / total_s for name, seconds in spent.items()} if total_s else {},
        step_seconds={name: seconds / len(steps) for name, seconds in spent.items()},
        stability=reduce(Stability.joined, map(stability, [*runs, *lost])),
        gaps_with_prefill=gaps_with_prefill(runs),
    )


def gaps_with_prefill(runs: Sequence[Run]) -> float:
    """Of all gaps between an answer's tokens, the share in which some step computed a prompt or a piece of one."""
    gaps = with_prefill = 0
    for run in runs:
        ends = sorted(line.end for line in run.steps if line.computes_prompt)
        for record in run.records:
            for earlier, later in zip(record.token_times, record.token_times[1:], strict=False):
                gaps += 1
                with_prefill += _any_between(ends, earlier, later)
    return with_prefill / gaps if gaps else 0.0


def _any_between(ends: Sequence[float], earlier: float, later: float) -> bool:
    """A step that ended after one and before or at the other. The reader has a token a moment after its step's end."""
    return bisect_right(ends, later) > bisect_right(ends, earlier)


def _over_time(steps: Sequence[StepLine], value: Callable[[StepLine], int]) -> float:
    lengths = [line.end - line.start for line in steps]
    total = sum(lengths)
    return sum(value(line) * length for line, length in zip(steps, lengths, strict=True)) / total if total > 0 else 0.0


def _mean(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in shares) / len(shares) for name in shares[0]} if shares else {}


def _grouped(repeats: Sequence[dict[str, Metrics]], lost: dict[str, Metrics]) -> dict[str, Speed]:
    names = list(dict.fromkeys(name for repeat in repeats for name in repeat))
    counts = {name: group.requests for name, group in lost.items()}
    return {name: _speed([repeat[name] for repeat in repeats if name in repeat], lost=counts.get(name, 0)) for name in names}


def _speed(repeats: Sequence[Metrics], *, lost: int) -> Speed:
    return Speed(
        requests=sum(one.requests for one in repeats) + lost,
        failed=sum(one.requests - one.succeeded for one in repeats) + lost,
        req_per_s=median(one.request_throughput for one in repeats),
        output_tok_per_s=median(one.output_throughput for one in repeats),
        total_tok_per_s=median(one.total_token_throughput for one in repeats),
        latencies={name: _latency([getattr(one, name) for one in repeats]) for name in LATENCIES},
    )


def _latency(repeats: Sequence[Distribution]) -> Latency:
    figures = {"mean": [one.mean for one in repeats], **{f"p{p}": [one.percentile(p) for one in repeats] for p in PERCENTILES}}
    counts = tuple(len(one) + one.missing for one in repeats)
    return Latency(**{name: _median(values) for name, values in figures.items()}, counts=counts)


def _median(values: Sequence[float]) -> float:
    """Of those that are numbers: NaN is a latency that nothing had."""
    numbers = [value for value in values if not math.isnan(value)]
    return median(numbers) if numbers else math.nan

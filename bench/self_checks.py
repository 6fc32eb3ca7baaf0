"""What must hold in any run, whatever it measured. A check gives the problem in a sentence with both numbers, or None.

Where nothing can be said of a run, a check raises `DoesNotApply` with the reason: who sees it neither passed nor failed is told why.
A report whose run fails one is marked, and says which: such figures contradict each other, so that none of them can be believed.
Must not know: how a run was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
import numpy.typing as npt

from octavo.bench.accounting import KVAccount
from octavo.bench.contradictions import PERCENTILES, SECTIONS, contradiction
from octavo.bench.metrics import measure
from octavo.bench.run_parts import apart
from octavo.bench.runs import Run
from octavo.bench.serving_table import as_json
from octavo.bench.step_log import StepLine

LITTLE = 0.02  # how far the mean number in the system may lie from arrival rate x mean time
COVERED = 0.98  # of a step's wall time
SEND_LAG = 0.05  # p99, of the median time to first token
TAIL, TAIL_S = 0.05, 0.5  # over HTTP, from the last token to the answer's end: of the time to that token; in seconds
A_A = 0.03  # ratio of a stack to itself
CLOCK = 1e-6  # seconds that rounding may make up
FEW = 8  # requests
TABLE = "the table agrees with itself"

Check = Callable[[Run], str | None]


class DoesNotApply(Exception):
    """Nothing can be said of this run, for the reason given."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one check: it failed, it does not apply, or it passed."""

    check: str
    problem: str = ""  # why it failed
    not_applicable: str = ""  # why nothing can be said

    @property
    def of_time(self) -> bool:
        """The machine may be to blame where it fails, and not the engine or what measures it."""
        return self.check in OF_TIME

    def fails(self, *, allow_noise: bool) -> bool:
        """It failed, and that is not allowed."""
        return bool(self.problem) and not (allow_noise and self.of_time)


def run_checks(run: Run) -> list[Checked]:
    """Every check, in their order; where the run was stopped and gone on with, of each part by its own clock, and of the whole table."""
    found = []
    for number, part in enumerate(parts := apart(run), 1):
        where = f"part {number}: " if len(parts) > 1 else ""
        found += [_checked(name, check, part, where) for name, check in CHECKS.items()]
    if len(parts) > 1:
        found.append(_checked(TABLE, table_does_not_contradict_itself, run, ""))
    return found


def _checked(name: str, check: Check, run: Run, where: str) -> Checked:
    try:
        problem = check(run)
    except DoesNotApply as reason:
        return Checked(name, not_applicable=f"{where}{reason}")
    return Checked(name) if problem is None else Checked(name, problem=where + problem)


def failed_checks(run: Run) -> list[Checked]:
    """Those that do not hold in this run."""
    return [one for one in run_checks(run) if one.problem]


# ------------------------------------------------------------------------- memory


def shares_sum_to_100(run: Run) -> str | None:
    """The six shares of the KV pool are all of it, in each step and on average, and none is negative."""
    _needs_steps(run)
    try:
        found = run.account
    except ValueError as error:
        return str(error)
    if abs(found.shares.total - 100) > 1e-6:
        return f"the shares of the KV pool sum to {found.shares.total:.3f} %"
    negative = [name for name, slots in found.series.items() if (slots < 0).any()]
    if negative:
        return f"{negative[0]} of the KV pool is {int(found.series[negative[0]].min())} slots in a step"
    if run.identity is not None and found.capacity != run.identity.pool_slots:
        return f"steps account for {found.capacity} slots, the pool has {run.identity.pool_slots}"
    return None


def pool_is_empty_at_the_end(run: Run) -> str | None:
    """Whoever ended gave everything back. Not of a run that was interrupted."""
    found = _account(run)
    if not run.complete:
        raise DoesNotApply("the run was interrupted")
    usage, open_blocks = run.steps[-1].usage, found.undecided
    if usage.filled + usage.held or usage.host or open_blocks:
        return (
            f"after the last step live sequences hold {usage.filled + usage.held} slots of the pool and {usage.host} of host memory, "
            f"{open_blocks} blocks were never given back"
        )
    return None


def no_slot_is_counted_twice(run: Run) -> str | None:
    """What a step wrote, and what it held and never wrote, was held by then: block events and usage tell the same story."""
    found = _account(run)
    if not found.overdrawn.any():
        return None
    worst = int(found.overdrawn.argmax())
    line, excess = run.steps[worst], int(found.overdrawn[worst])
    steps = int((found.overdrawn > 0).sum())
    return (
        f"in step {line.step} live sequences held {line.usage_running.held} unwritten slots; {line.num_written} were written; with those "
        f"that never were it is {excess} more than there were; so in {steps} steps"
    )


def _needs_steps(run: Run) -> None:
    if not run.steps:
        raise DoesNotApply("no step was seen" if run.server is None else "the engine's steps are out of sight, behind HTTP")


def _account(run: Run) -> KVAccount:
    _needs_steps(run)
    if run.accounted is None:
        raise DoesNotApply("the pool has no account, as another check says")
    return run.accounted


# -------------------------------------------------------------------------- times


def gaps_make_up_the_whole(run: Run) -> str | None:
    """Time to first token and all gaps between tokens are the time from end to end, and tokens come in order, after they are asked for.

    Over HTTP, where no steps are seen, an answer ends with its connection's last bytes, a moment after its last token; where it is more
    than that, the end-to-end latency, which ends with the last token, says too little.
    """
    _needs_tokens(run)
    for record in run.records:
        times = record.token_times
        if not times:
            continue
        gaps = [later - earlier for earlier, later in pairwise(times)]
        if min(gaps, default=0.0) < -CLOCK or times[0] < record.sent - CLOCK:
            return f"request {record.index}: a token came {-min([*gaps, times[0] - record.sent]):.6f} s before what it follows"
        whole = (times[0] - record.sent) + sum(gaps)
        after = (record.ended - record.sent) - whole
        late = max(CLOCK, 1e-3 * whole)
        if record.succeeded and not -late <= after <= (late if run.steps else max(TAIL_S, TAIL * whole)):
            return (
                f"request {record.index}: time to first token {times[0] - record.sent:.6f} s and gaps of {sum(gaps):.6f} s are "
                f"{whole:.6f} s, it took {record.ended - record.sent:.6f} s from end to end"
            )
    return None


def each_token_has_a_time(run: Run) -> str | None:
    """Where the tokens themselves are known, there are as many as there are times of tokens."""
    if not any(record.token_ids for record in run.records):
        raise DoesNotApply("no token is known")
    for record in run.records:
        if record.token_ids and len(record.token_ids) != len(record.token_times):
            return f"request {record.index}: {len(record.token_ids)} tokens came at {len(record.token_times)} times"
    return None


def littles_law(run: Run) -> str | None:
    """The mean number of requests in the system, which the steps saw, is arrival rate x mean time in it, which the requests saw.

    Not of a run with few requests or much time between steps, where the two are not the same mean.
    """
    _needs_steps(run)
    inside = [record for record in run.records if record.finish_reason != "refused" and record.ended > record.sent]
    if len(inside) < FEW:
        raise DoesNotApply(f"{len(inside)} requests were in the system, and of fewer than {FEW} a mean says little")
    start, end = min(record.sent for record in inside), max(record.ended for record in inside)
    by_requests = sum(record.ended - record.sent for record in inside) / (end - start)
    by_steps = _mean_in_system(run.steps, np.sort([record.sent for record in inside]), end)
    if abs(by_steps / by_requests - 1) > LITTLE:
        return (
            f"the steps saw {by_steps:.3f} requests waiting or running on average; {len(inside)} requests in {end - start:.3f} s that took "
            f"{by_requests * (end - start) / len(inside):.3f} s each are {by_requests:.3f}"
        )
    return None


def _mean_in_system(steps: Sequence[StepLine], sent: npt.NDArray[np.float64], end: float) -> float:
    """Waiting and running, over time. A step's counts are those when it was over, and whoever leaves does so then.

    The engine takes who comes between two steps; who comes during a step is not in its count yet.
    """
    start = float(sent[0])
    total, before, since = 0.0, 0.0, start
    for line in steps:
        stop = min(line.end, end)
        first, last = np.searchsorted(sent, (since, stop))
        if stop > since:
            total += before * (stop - since) + float((stop - sent[first:last]).sum())
        during = last - np.searchsorted(sent, line.start, side="right")
        before, since = line.num_waiting + line.num_running + max(0, during), max(since, stop)
    total += before * (end - since)
    return float(total / (end - start))


def parts_cover_the_steps(run: Run) -> str | None:
    """The parts of a step's time that are told apart are nearly all of it."""
    _needs_steps(run)
    wall, at = 0.0, 0.0
    for line in run.steps:  # steps in flight together are counted once
        wall += max(0.0, line.end - max(line.start, at))
        at = max(at, line.end)
    parts = sum(sum(line.seconds.values()) for line in run.steps if line.num_rows)
    empty = sum(line.end - line.start for line in run.steps if not line.num_rows)
    if wall - empty <= CLOCK:
        raise DoesNotApply("the steps took no time")
    if parts < COVERED * (wall - empty):
        return f"the parts of the steps' time are {parts:.4f} s of {wall - empty:.4f} s: {parts / (wall - empty):.1%} are accounted for"
    return None


def sent_on_time(run: Run) -> str | None:
    """The client kept up. If not, what it measured is its own queue.

    In process a request that is due while a step runs waits for that step's end, and is late beyond it; less than a usual step is nothing.
    """
    _needs_tokens(run)
    late, typical = float(np.percentile(_unexplained_lags(run), 99)), median(r.ttft for r in run.records if r.ttft is not None)
    step = median(line.end - line.start for line in run.steps) if run.steps else 0.0
    if late > max(CLOCK, SEND_LAG * typical, step):
        return (
            f"requests were sent up to {late:.4f} s late (p99), {late / typical:.1%} of the median time to first token of {typical:.4f} s"
        )
    return None


def _unexplained_lags(run: Run) -> npt.NDArray[np.float64]:
    """Seconds by which each request was sent later than when it was due, or than the end of the step that ran then."""
    due, lags = np.array([record.due for record in run.records]), np.array([record.send_lag for record in run.records])
    if not run.steps:
        return lags
    starts, ends = np.array([line.start for line in run.steps]), np.array([line.end for line in run.steps])
    step = np.searchsorted(ends, due, side="right")  # the first one that ends afterwards
    ran = step < len(ends)
    ran[ran] = starts[step[ran]] < (due + lags)[ran]
    free = due.copy()
    free[ran] = ends[step[ran]]
    return np.asarray(np.maximum(0.0, due + lags - free))


def _needs_tokens(run: Run) -> None:
    if not any(record.token_times for record in run.records):
        raise DoesNotApply("no request has a token")


# ------------------------------------------------------------------------- tokens


def tokens_are_accounted_for(run: Run) -> str | None:
    """Tokens that steps ran are those that answers needed, those computed again after a preemption, and guesses that were wrong.

    An answer of n tokens to a prompt of p, of which c were cached, needs p - c + n - 1. Of a request that ended early it is not known
    how much of its prompt ran; of one that was preempted, how much of it came from a cache of others when it came back.
    """
    _needs_steps(run)
    if failed := sum(bool(line.error) for line in run.steps):
        raise DoesNotApply(f"{failed} steps failed, and what they had run is not known")
    planned = sum(line.num_tokens for line in run.steps)
    again = sum(line.num_recomputed for line in run.steps)
    wrong = sum(line.num_drafted - line.num_accepted for line in run.steps)
    least = most = 0
    cached = any(line.stats.hit_tokens for line in run.steps)
    for record in run.records:
        prompt, made = record.num_prompt_tokens - record.num_cached_tokens, record.num_output_tokens
        if record.succeeded or made:
            whole = prompt + made - 1
            least += 0 if cached and record.num_preemptions else whole
            most += whole if record.succeeded else whole + 1
        elif record.finish_reason != "refused" and record.first_scheduled is not None:
            most += prompt
    if not least + again + wrong <= planned <= most + again + wrong:
        needed = f"{most}" if least == most else f"{least} to {most}"
        return f"steps ran {planned} tokens; answers needed {needed}, {again} were computed again, {wrong} were wrong guesses"
    return None


# ------------------------------------------------------------------------- tables


def table_does_not_contradict_itself(run: Run) -> str | None:
    """The figures of this run's own table, with how many requests were sent at once, where the run says it."""
    if not run.records:
        raise DoesNotApply("no request was sent")
    most = run.settings.get("max_concurrency", run.settings.get("concurrency"))
    return contradiction({**as_json(measure(run.records), sections=SECTIONS, percentiles=PERCENTILES), "max_concurrency": most})


def a_a(one: Sequence[float], other: Sequence[float], *, what: str = "time") -> str | None:
    """The same stack, measured twice, is within 3 % of itself; else differences of that size mean nothing.

    By the geometric mean of the ratios of pairs, which had the same work. Raises ValueError where the sides do not pair up.
    """
    if len(one) != len(other) or not one:
        raise ValueError(f"repeats must come in pairs, not {len(one)} and {len(other)}")
    if not all(math.isfinite(value) and value > 0 for value in (*one, *other)):
        return f"the same stack measured twice has no {what} above 0 in every repeat, so that it cannot be compared with itself"
    ratio = math.exp(math.fsum(math.log(later / before) for before, later in zip(one, other, strict=True)) / len(one))
    if abs(ratio - 1) > A_A:
        return f"the same stack measured twice differs by {ratio - 1:+.1%} in {what}: differences below that mean nothing here"
    return None


def a_a_of_runs(one: Run, other: Run) -> str | None:
    """Two runs of the same stack and work, by their duration."""
    return a_a([one.duration], [other.duration], what="duration")


CHECKS: dict[str, Check] = {
    "shares sum to 100": shares_sum_to_100,
    "pool empty at the end": pool_is_empty_at_the_end,
    "no slot counted twice": no_slot_is_counted_twice,
    "TTFT + gaps = end to end": gaps_make_up_the_whole,
    "a time for each token": each_token_has_a_time,
    "Little's law": littles_law,
    "step parts cover the steps": parts_cover_the_steps,
    "sent on time": sent_on_time,
    "tokens planned = delivered + recomputed": tokens_are_accounted_for,
    TABLE: table_does_not_contradict_itself,
}
"""Of one run, by name."""

TWICE = f"A/A within {100 * A_A:g} %"
"""Of an ablation: its baseline and the same again."""

OF_TIME = ("step parts cover the steps", "sent on time", "Little's law", TWICE)
"""Steps of a few milliseconds, or a machine that does something else besides, can fail these."""

"""What is counted while the engine runs: an observer that adds up steps and requests, and a `Reading` of all numbers at one moment.

A step costs some twenty additions, however many rows it has: gaps between tokens come counted. The sums that engine, scheduler and
allocator keep anyway are read when somebody asks. Must not know: names of metrics, HTTP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.engine import Engine
from octavo.core.kv import KVStats, KVUsage
from octavo.core.outputs import RequestOutput, StepReport
from octavo.core.request import Request

REASONS = ("error", "timeout", "abort", "length", "stop")  # of several samples' the first in this order is the request's
ANSWERED = ("length", "stop")
PARTS = ("schedule", "inputs", "forward", "sample", "apply")
TRANSFERS = ("copy", "out", "in")

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLES = (1, 2, 5, 10, 20)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `most`."""
    return tuple(digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5) if digit * 10**power <= most)


class Histogram:
    """Counts of values up to each bound, and their sum. Unlike the client library's, it takes a value many times at once."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """The value came so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def copy(self) -> Histogram:
        """As it is now."""
        copied = Histogram(self.bounds)
        copied.counts, copied.total = list(self.counts), self.total
        return copied


class ClassTally:
    """The requests of one class: how they ended, and of those that were answered how long they took."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.ended = dict.fromkeys(REASONS, 0)
        self.first_token = Histogram(FIRST_TOKEN)
        self.latency = Histogram(LATENCY)

    def at(self, running: int, waiting: int) -> ClassTally:
        """As it is now, with so many requests in the scheduler."""
        copied = ClassTally()
        copied.running, copied.waiting, copied.ended = running, waiting, dict(self.ended)
        copied.first_token, copied.latency = self.first_token.copy(), self.latency.copy()
        return copied


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """All numbers at one moment. What is counted is counted since the engine was made, and never goes down."""

    running: int
    waiting: int
    usage: KVUsage
    stats: KVStats
    requests: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    out_of_memory: int  # steps
    max_num_seqs: int  # now: lower than what was set while memory is short
    steps: int
    idle_rows: int
    drafted: int
    accepted: int
    ended: dict[str, int]  # requests, by reason
    seconds: dict[str, float]  # of steps, by part
    transferred: dict[str, int]  # slots, by kind
    histograms: dict[str, Histogram]
    classes: dict[str, ClassTally]  # by name, where classes are configured

    @property
    def kv_usage(self) -> float:
        """Share of the pool that live sequences hold. What is kept for reuse is as good as free."""
        usage = self.usage
        held = usage.filled + usage.held
        return held / max(1, held + usage.external + usage.cached + usage.free)


class Tallies:
    """Add it to an engine's observers before the first request. Its methods are called in the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        lengths = one_two_five(engine.max_model_len)
        self._pool = engine.kv.usage(), engine.kv.stats()  # as it was known last
        self._steps = 0
        self._idle_rows = self._drafted = self._accepted = 0
        self._ended = dict.fromkeys(REASONS, 0)
        named = engine.scheduler.options.classes
        self._classes = {name: ClassTally() for name in sorted({"default", *named})} if named else {}
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._transferred = dict.fromkeys(TRANSFERS, 0)
        self._histograms = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN),
            "inter_token_latency_seconds": Histogram(TOKEN),
            "e2e_request_latency_seconds": Histogram(LATENCY),
            "request_queue_time_seconds": Histogram(LATENCY),
            "request_prefill_time_seconds": Histogram(LATENCY),
            "request_decode_time_seconds": Histogram(LATENCY),
            "request_inference_time_seconds": Histogram(LATENCY),
            "request_time_per_output_token_seconds": Histogram(TOKEN),
            "request_prompt_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_params_max_tokens": Histogram(lengths),
            "request_params_n": Histogram(SAMPLES),
            "iteration_tokens_total": Histogram(STEP_TOKENS),
            "step_rows": Histogram(STEP_ROWS),
        }

    def octavo_step_finished(self, report: StepReport) -> None:
        """Count one step. Of one that was undone nothing came."""
        self._pool = report.usage, report.stats
        if report.error:
            return
        histograms = self._histograms
        if report.num_rows:
            self._steps += 1
            histograms["iteration_tokens_total"].observe(report.num_tokens)
            histograms["step_rows"].observe(report.num_rows)
        self._idle_rows += report.idle_rows
        self._drafted += report.num_drafted
        self._accepted += report.num_accepted
        for part, seconds in report.seconds.items():
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        for kind, slots in report.transfers.items():
            self._transferred[kind] = self._transferred.get(kind, 0) + slots
        for seconds in report.first_tokens:
            histograms["time_to_first_token_seconds"].observe(seconds)
        for seconds, count in report.token_gaps.items():
            histograms["inter_token_latency_seconds"].observe(seconds, count)

    def octavo_request_finished(self, output: RequestOutput) -> None:
        """Count one request. One that has no answer is not in the histograms: failed requests are not fast requests."""
        reason = reason_of(output)
        self._ended[reason] += 1
        of_class = self._classes.get(output.class_name)
        if of_class is not None:
            of_class.ended[reason] += 1
        times, params, histograms = output.times, output.params, self._histograms
        if reason not in ANSWERED or times is None or params is None or times.finished is None:
            return
        made = sum(len(one.token_ids) for one in output.outputs)
        histograms["e2e_request_latency_seconds"].observe(times.finished - times.arrival)
        if of_class is not None and times.first_token is not None:
            of_class.latency.observe(times.finished - times.arrival)
            of_class.first_token.observe(times.first_token - times.arrival)
        histograms["request_prompt_tokens"].observe(output.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(made)
        histograms["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(params.max_tokens)
        if times.first_scheduled is None:
            return
        histograms["request_queue_time_seconds"].observe(times.first_scheduled - times.arrival)
        histograms["request_inference_time_seconds"].observe(times.finished - times.first_scheduled)
        if times.first_token is None:
            return
        histograms["request_prefill_time_seconds"].observe(times.first_token - times.first_scheduled)
        histograms["request_decode_time_seconds"].observe(times.finished - times.first_token)
        longest = max(len(one.token_ids) for one in output.outputs)
        if longest > 1:
            histograms["request_time_per_output_token_seconds"].observe((times.finished - times.first_token) / (longest - 1))

    def read(self, engine: Engine) -> Reading:
        """All numbers now; for the engine's thread, between two steps."""
        self._pool = engine.kv.usage(), engine.kv.stats()
        return self.glance(engine)

    def glance(self, engine: Engine) -> Reading:
        """From any thread, while a step runs: the pool as it was known last, and all others as far as they were counted."""
        scheduler, (usage, stats) = engine.scheduler, self._pool
        return Reading(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            usage=usage,
            stats=stats,
            requests=engine.num_taken,
            prompt_tokens=engine.token_times.num_prompt_tokens,
            generated_tokens=engine.answers.num_tokens,
            preemptions=scheduler.num_preemptions,
            out_of_memory=engine.relief.count,
            max_num_seqs=scheduler.max_num_seqs,
            steps=self._steps,
            idle_rows=self._idle_rows,
            drafted=self._drafted,
            accepted=self._accepted,
            ended=dict(self._ended),
            seconds=dict(self._seconds),
            transferred=dict(self._transferred),
            histograms={name: histogram.copy() for name, histogram in self._histograms.items()},
            classes=self._by_class(list(scheduler.running), list(scheduler.waiting)),
        )

    def _by_class(self, running: Sequence[Request], waiting: Sequence[Request]) -> dict[str, ClassTally]:
        if not self._classes:
            return {}
        run, wait = (Counter(request.class_name for request in requests) for requests in (running, waiting))
        return {name: tally.at(run[name], wait[name]) for name, tally in self._classes.items()}


def reason_of(output: RequestOutput) -> str:
    """Why a request ended."""
    reasons = {one.finish_reason for one in output.outputs}
    return next((reason for reason in REASONS if reason in reasons), "abort")

"""What a run's records say: latencies and throughput, for all requests, by class, and by the length of the prompt.

Definitions, and where other tools mean something else by the same name: docs/explanation/metrics.md. Times are seconds.
Must not know: who made the records, how figures are printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.bench.distribution import Distribution
from octavo.bench.records import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Of a set of requests. Tokens and throughput are those of requests that succeeded; the latencies' percentiles count all of them."""

    requests: int
    succeeded: int
    failures: dict[str, int]  # by finish reason; "unanswered" where there is none
    duration: float  # of the whole run, from its start to the end of its last request
    input_tokens: int
    output_tokens: int
    cached_tokens: int  # of the input, found in a prefix cache
    preemptions: int
    send_lag: Distribution  # from when a request was due to when it was really sent, or given to the engine
    queue: Distribution  # from sending to its first step; empty where that is unknown
    ttft: Distribution  # from sending to the first token
    tpot: Distribution  # (last token - first token) / (tokens - 1)
    itl: Distribution  # between events that brought tokens, of all requests together
    token_gap: Distribution  # between tokens: as itl, but tokens that came together are 0 apart
    e2el: Distribution  # from sending to the last token
    normalized: Distribution  # e2el / tokens

    @property
    def request_throughput(self) -> float:
        """Answers a second."""
        return self._rate(self.succeeded)

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return self._rate(self.output_tokens)

    @property
    def total_token_throughput(self) -> float:
        """Input and output tokens a second."""
        return self._rate(self.input_tokens + self.output_tokens)

    def _rate(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else 0.0


LATENCIES = ("queue", "ttft", "tpot", "itl", "token_gap", "e2el", "normalized")
"""The latencies of `Metrics`, by name."""


def measure(records: Sequence[RequestRecord], *, duration: float | None = None) -> Metrics:
    """The metrics of these records. `duration`: of the run that they are a part of; None: they are all of it."""
    answered = [record for record in records if record.succeeded]
    lost = len(records) - len(answered)
    rates = [(record, record.token_times) for record in answered]
    queued = [record.first_scheduled - record.sent for record in records if record.first_scheduled is not None]
    gaps = [later - earlier for record in records for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)]
    return Metrics(
        requests=len(records),
        succeeded=len(answered),
        failures=dict(Counter(record.finish_reason or "unanswered" for record in records if not record.succeeded)),
        duration=max((record.ended for record in records), default=0.0) if duration is None else duration,
        input_tokens=sum(record.num_prompt_tokens for record in answered),
        output_tokens=sum(record.num_output_tokens for record in answered),
        cached_tokens=sum(record.num_cached_tokens for record in answered),
        preemptions=sum(record.num_preemptions for record in records),
        send_lag=Distribution(record.send_lag for record in records),
        queue=Distribution(queued, missing=sum(record.first_scheduled is None for record in records) if queued else 0),
        ttft=Distribution(
            (times[0] - record.sent for record in records if (times := record.token_times)),
            missing=sum(not record.token_times for record in records),
        ),
        tpot=Distribution(
            ((times[-1] - times[0]) / (record.num_output_tokens - 1) for record, times in rates if record.num_output_tokens > 1 and times),
            missing=lost,
        ),
        itl=Distribution(gap for gap in gaps if gap > 0),
        token_gap=Distribution(gaps),
        e2el=Distribution((times[-1] - record.sent for record, times in rates if times), missing=lost),
        normalized=Distribution(((times[-1] - record.sent) / record.num_output_tokens for record, times in rates if times), missing=lost),
    )


def by_class(records: Sequence[RequestRecord]) -> dict[str, Metrics]:
    """Of each class, over the duration of the whole run."""
    groups = _by(records, lambda record: record.class_name)
    return {name: groups[name] for name in sorted(groups)}


def by_prompt_length(records: Sequence[RequestRecord]) -> dict[str, Metrics]:
    """Of prompts of 1-16, 17-32, 33-64 tokens and so on, over the duration of the whole run."""
    groups = _by(records, lambda record: length_bucket(record.num_prompt_tokens))
    return {name: groups[name] for name in sorted(groups, key=lambda name: int(name.partition("-")[0]))}


def length_bucket(length: int) -> str:
    """The name of the bucket that a length falls in: its shortest and its longest, powers of two from 16."""
    top = max(16, 1 << (length - 1).bit_length())
    return f"{1 if top == 16 else top // 2 + 1}-{top}"


def _by(records: Sequence[RequestRecord], name_of: Callable[[RequestRecord], str]) -> dict[str, Metrics]:
    duration = max((record.ended for record in records), default=0.0)
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(name_of(record), []).append(record)
    return {name: measure(group, duration=duration) for name, group in groups.items()}

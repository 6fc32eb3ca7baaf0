"""`RequestRecord`: what one request of a run saw. Metrics and reports are computed from these and the step log alone.

Must not know: who sent it, how, and what is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.bench.work import Work

INTERRUPTED = "interrupted by Ctrl-C"
"""The error of a request that was under way when its run was stopped."""
BROKEN = "run broke"
"""How a request ended whose run did, with an error."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, answered or not. Times are seconds after the run's start."""

    index: int  # in the work
    num_prompt_tokens: int
    max_tokens: int  # what was asked for
    due: float  # when it should have been sent
    sent: float  # what its latencies count from; over HTTP when it was, in process when it was due
    ended: float
    class_name: str = "default"
    token_times: list[float] = field(default_factory=list)  # of each output token, when its reader had it; together means equal
    first_scheduled: float | None = None  # None: unknown, as over HTTP, or never
    finish_reason: str = ""  # "length", "stop", "abort", "timeout", "error", "refused"; "": no whole answer
    error: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_ids: list[int] = field(default_factory=list)  # where they are known
    status: int = 0  # of the HTTP answer; 0: there is none
    num_retries: int = 0  # times it was sent again, since a server hung up on an idle connection
    num_counted: int | None = None  # output tokens as a server counts them, where their times are those of events only
    added: float | None = None  # in process, when the engine was given it, between two steps; None: over HTTP, never, or not known

    @property
    def succeeded(self) -> bool:
        """It has its answer."""
        return self.finish_reason in ("length", "stop") and not self.error

    @property
    def cut_short(self) -> bool:
        """It was under way when its run was stopped: nothing is known of what it would have come to."""
        return self.error == INTERRUPTED

    @property
    def num_output_tokens(self) -> int:
        """Tokens made, never counted from text."""
        return len(self.token_times) if self.num_counted is None else self.num_counted

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def send_lag(self) -> float:
        """Seconds from when it was due to when it was really sent."""
        return (self.sent if self.added is None else self.added) - self.due

    @classmethod
    def never_sent(cls, work: Work, index: int, now: float, *, because_of: RequestRecord) -> RequestRecord:
        """Of a later turn, where an earlier one has no answer: it was asked for, and failed."""
        item = work.items[index]
        return cls(
            index=index,
            num_prompt_tokens=work.prompt_len(index),
            max_tokens=item.output_len,
            due=now,
            sent=now,
            ended=now,
            class_name=item.class_name,
            error=f"not sent: item {because_of.index}, which it goes on from, has no answer ({because_of.finish_reason})",
        )

    @classmethod
    def of_broken_run(cls, work: Work, index: int, reason: str) -> RequestRecord:
        """Of a run that ended with an error, and left no record: it was asked for, and failed."""
        item = work.items[index]
        return cls(
            index=index,
            num_prompt_tokens=work.prompt_len(index),
            max_tokens=item.output_len,
            due=0.0,
            sent=0.0,
            ended=0.0,
            class_name=item.class_name,
            finish_reason=BROKEN,
            error=reason,
        )

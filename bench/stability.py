"""What went wrong in a run, counted by kind, and how many requests were answered at once without that.

Must not know: how figures are printed. Definitions: docs/explanation/metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from octavo.bench.records import RequestRecord
from octavo.bench.runs import Run, sum_known
from octavo.core.errors import OutOfMemoryError

HELD = 0.1  # of a run's duration: so long must a number of requests have been answered at once
KEPT = 0.9  # of the tokens a second with fewer requests: so many must there be with more


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """Counts of one run; None: nobody saw it."""

    failed: int  # requests without their whole answer, those of the following three included
    refused: int
    timeouts: int
    aborts: int
    http_5xx: int | None  # answers with such a status; in process there is no HTTP
    retries: int  # requests sent once more, since the server hung up on an idle connection
    preemptions: int | None
    failed_steps: int | None  # for another reason than memory
    out_of_memory: int | None  # steps
    restarts: int | None  # of the engine's process
    stable: int  # the highest stable concurrency; 0: there is none

    def joined(self, other: Stability) -> Stability:
        """Of two repeats: sums, and the concurrency that was stable in both."""
        found = {one.name: sum_known(getattr(self, one.name), getattr(other, one.name)) for one in fields(Stability)}
        return Stability(**found | {"stable": min(self.stable, other.stable)})  # type: ignore[arg-type]


def stability(run: Run) -> Stability:
    """Of one run. In process the step log tells of preemptions and steps, over HTTP what the server counted meanwhile."""
    records, counted = run.records, run.counted
    ends = [record.finish_reason for record in records]
    known: dict[str, int | None] = {
        "preemptions": counted.get("preemptions"),
        "failed_steps": counted.get("failed steps"),
        "out_of_memory": counted.get("steps out of memory"),
        "restarts": counted.get("restarts"),
        "http_5xx": sum(500 <= record.status < 600 for record in records),
    }
    if run.server is None:
        errors = [line.error for line in run.steps if line.error]
        short = sum(error.startswith(OutOfMemoryError.__name__) for error in errors)
        known = {
            "preemptions": sum(record.num_preemptions for record in records),
            "failed_steps": len(errors) - short,
            "out_of_memory": short,
            "restarts": 0,  # a process that ended has no records to tell of it
            "http_5xx": None,
        }
    return Stability(
        failed=sum(not record.succeeded for record in records),
        refused=ends.count("refused"),
        timeouts=ends.count("timeout"),
        aborts=ends.count("abort"),
        retries=sum(record.num_retries for record in records),
        stable=highest_stable(records),
        **known,
    )


def highest_stable(records: Sequence[RequestRecord]) -> int:
    """The most requests N that were answered at once, so that it lasted.

    A request is answered from its first token to its end. N or more were for at least a tenth of the run; no request failed while fewer
    than N or N were; and tokens came at nine tenths or more of the rate at which they came while fewer than N were. 0: there is no such N.
    """
    answered = [record for record in records if record.token_times]
    duration = max((record.ended for record in records), default=0.0)
    if not answered or duration <= 0:
        return 0
    begins, ends = np.sort([one.token_times[0] for one in answered]), np.sort([one.ended for one in answered])
    times = np.unique(np.concatenate([begins, ends]))  # between two of them, nothing begins and nothing ends
    # A token at the end of such a stretch was made in it; a request's first one, before it counts, and is left out.
    at_once = np.searchsorted(begins, times[:-1], side="right") - np.searchsorted(ends, times[:-1], side="right")
    place = np.searchsorted(times[1:], np.concatenate([one.token_times[1:] for one in answered]), side="left")
    most = int(at_once.max(initial=0))
    seconds = np.bincount(at_once, weights=np.diff(times), minlength=most + 1)
    tokens = np.bincount(at_once[place], minlength=most + 1).astype(float)
    failures = [
        int(np.searchsorted(begins, one.ended, side="left") - np.searchsorted(ends, one.ended, side="left"))
        for one in records
        if not one.succeeded
    ]
    for number in range(min([most, *(level - 1 for level in failures)]), 0, -1):
        if seconds[number:].sum() < HELD * duration:
            continue
        fewer = seconds[1:number].sum()
        if fewer == 0 or tokens[number:].sum() / seconds[number:].sum() >= KEPT * tokens[1:number].sum() / fewer:
            return number
    return 0


NAMES = {
    "failed": "failed",
    "refused": "refused",
    "timeouts": "timeouts",
    "aborts": "aborts",
    "http_5xx": "HTTP 5xx",
    "retries": "retries",
    "preemptions": "preemptions",
    "failed_steps": "failed steps",
    "out_of_memory": "steps out of memory",
    "restarts": "restarts",
    "stable": "highest stable concurrency",
}
"""As they are printed."""


def in_words(found: Stability) -> dict[str, str]:
    """By what is printed; "-" where nobody saw it, or where no number was stable."""
    values = {label: getattr(found, name) for name, label in NAMES.items()}
    return {label: "-" if value is None or (label == NAMES["stable"] and not value) else str(value) for label, value in values.items()}

"""What went wrong is counted by kind, and the highest stable concurrency is one that a pencil finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.bench.identity import ServerIdentity
from octavo.bench.records import RequestRecord
from octavo.bench.runs import Run
from octavo.bench.stability import NAMES, highest_stable, in_words, stability
from tests.bench.ablation.made import made_run, record, step
from tests.bench.measured import timed

SERVER = ServerIdentity(date="", url="http://x", endpoint="/v1/completions", model="m")


def overlapping(count: int, *, begin: float = 0.0, seconds: float = 10.0, gap: float = 1.0) -> list[RequestRecord]:
    """So many, each with its first token at `begin` and one every `gap` seconds for so long."""
    times = [begin + gap * n for n in range(round(seconds / gap) + 1)]
    return [record(index, *times) for index in range(count)]


def test_all_at_once() -> None:
    """What lasted is stable; a moment is not."""
    assert highest_stable([]) == 0 and highest_stable([record(0)]) == 0
    assert highest_stable(overlapping(3)) == 3
    assert highest_stable([*overlapping(3), *overlapping(2, begin=4.0, seconds=0.9, gap=0.45)]) == 3
    assert highest_stable([*overlapping(3), *overlapping(2, begin=4.0, seconds=1.5, gap=0.5)]) == 5


def test_a_failure_ends_it() -> None:
    """As many as were answered when one failed are not stable, whenever that was."""
    many = [*overlapping(4), *overlapping(2, begin=10.0)]
    assert highest_stable(many) == 4
    failed = record(9, 1.0, 2.0, 3.5, finish_reason="error", ended=3.5)
    assert highest_stable([*many, failed]) == 4  # five were answered when it failed
    refused = record(9, ended=12.0, finish_reason="refused")
    assert highest_stable([*many, refused]) == 1  # two were
    assert highest_stable([*many, record(9, ended=30.0)]) == 0  # none was


@pytest.mark.parametrize(("gap", "found"), [(2.0, 4), (2.25, 2)])
def test_more_that_brings_less_is_not_stable(gap: float, found: int) -> None:
    """Two give two tokens a second; four must give nine tenths of that."""
    slower = [replace(one, index=10 + one.index) for one in overlapping(4, begin=10.0, seconds=36.0, gap=gap)]
    assert highest_stable([*overlapping(2), *slower]) == found


def test_counts_in_process() -> None:
    """Of the records and the step log; nobody sees HTTP."""
    run = timed("paged", "chunked")
    found = stability(run)
    assert found.preemptions == sum(line.num_preempted for line in run.steps) > 0
    assert (found.failed, found.http_5xx, found.restarts, found.failed_steps, found.out_of_memory) == (0, None, 0, 0, 0)
    assert found.stable >= 1
    errors = ("OutOfMemoryError: memory ran out in a step: x", "ValueError: y", "")
    lost = [record(n, finish_reason=reason) for n, reason in enumerate(("timeout", "abort", "refused", "error"))]
    found = stability(made_run(1.0, records=lost, steps=[step(float(n), n + 1.0, error=error) for n, error in enumerate(errors)]))
    assert (found.out_of_memory, found.failed_steps, found.failed) == (1, 1, 4)
    assert (found.timeouts, found.aborts, found.refused, found.stable) == (1, 1, 1, 0)


def test_counts_over_http() -> None:
    """Statuses and retries of the records; of the engine what the server counted, and nothing where it does not say."""
    records = [record(0, 1.0, 2.0, status=200, num_retries=1), record(1, status=503), record(2, status=500), record(3, status=404)]
    run = Run(work=made_run(1.0).work, records=records, server=SERVER, counted={"preemptions": 7, "restarts": 1, "failed steps": None})
    found = stability(run)
    assert (found.http_5xx, found.retries, found.preemptions, found.restarts) == (2, 1, 7, 1)
    assert found.failed_steps is None and found.out_of_memory is None
    words = in_words(found)
    assert list(words) == list(NAMES.values()) and words["failed steps"] == words["highest stable concurrency"] == "-"


def test_repeats_together() -> None:
    """Sums; what one does not know, nobody does; and a concurrency must be stable in both."""
    one, other = stability(made_run(4.0)), replace(stability(made_run(4.0)), stable=1, failed=2, http_5xx=3)
    found = one.joined(other)
    assert (one.stable, found.stable, found.failed, found.http_5xx) == (2, 1, 2, None)

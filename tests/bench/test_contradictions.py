"""Two figures that cannot both be true are found, in our own tables and in other people's."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.contradictions import contradiction
from octavo.bench.self_checks import CHECKS
from tests.bench.measured import timed

GOOD: dict[str, Any] = {
    "duration": 66.09233,
    "completed": 1000,
    "total_input_tokens": 1_024_000,
    "total_output_tokens": 127_598,
    "request_throughput": 15.13,
    "output_throughput": 1930.60,
    "total_token_throughput": 17424.08,
    "mean_ttft_ms": 200.0,
    "median_ttft_ms": 150.0,
    "p99_ttft_ms": 900.0,
    "mean_tpot_ms": 20.0,
    "median_tpot_ms": 19.0,
    "p99_tpot_ms": 30.0,
    "mean_e2el_ms": 2740.0,
    "median_e2el_ms": 2600.0,
    "p99_e2el_ms": 5000.0,
}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "the article's: one in a hundred took longer than the whole run": (
        {"p99_e2el_ms": 93_000.0},
        "p99 e2el of 93000 ms is longer than the whole run of 66.0923 s",
    ),
    "percentiles that go down": ({"p99_tpot_ms": 12.0}, "median tpot of 19 ms is above p99 tpot of 12 ms"),
    "p95 above p99": ({"p95_ttft_ms": 950.0}, "p95 ttft of 950 ms is above p99 ttft of 900 ms"),
    "requests a second": ({"request_throughput": 20.0}, "completed in 66.0923 s make 15.13 a second, but request_throughput is 20"),
    "tokens a second": ({"total_output_tokens": 256_000}, "total_output_tokens in 66.0923 s make 3873.37 a second"),
    "all tokens a second": ({"total_token_throughput": 20_000.0}, "total_input_tokens and total_output_tokens"),
    "a first token after the last": (
        {"median_ttft_ms": 2700.0, "p99_ttft_ms": 2800.0},
        "median ttft of 2700 ms is above",
    ),
    "more requests at once than were sent": ({"max_concurrency": 32}, "41.5 in the system on average, but at most 32"),
}


def test_a_table_without_contradiction() -> None:
    """B1's own figures, with latencies that go with them; figures that are not there say nothing."""
    assert contradiction(GOOD) is None
    assert contradiction({}) is None and contradiction({"duration": None, "mean_ttft_ms": None, "failures": {}, "completed": True}) is None
    assert contradiction(GOOD | {"max_concurrency": 64}) is None


@pytest.mark.parametrize("name", CASES)
def test_a_table_that_contradicts_itself(name: str) -> None:
    """One figure changed."""
    changes, words = CASES[name]
    found = contradiction(GOOD | changes)
    assert found is not None and words in found


@pytest.mark.parametrize("name", ["max_concurrency", "concurrency"])
def test_our_own_table_knows_how_many_were_sent_at_once(name: str) -> None:
    """Over HTTP, where no steps are seen, it is what Little's law can be held against: more were in the system than a closed loop has."""
    run = timed("paged", "continuous")
    run.steps.clear()
    check = CHECKS["the table agrees with itself"]
    inside = sum(record.ended - record.sent for record in run.records) / run.duration
    assert inside > 2
    run.settings = {name: int(inside) - 1}
    assert f"in the system on average, but at most {int(inside) - 1} were sent at once" in str(check(run))
    run.settings = {name: int(inside) + 1}
    assert check(run) is None


def test_our_own_table_is_checked() -> None:
    """A run whose records say that a request took longer than all of them together."""
    run = timed("paged", "continuous")
    check = CHECKS["the table agrees with itself"]
    assert check(run) is None
    for record in run.records:
        record.sent -= 100.0
    assert "longer than the whole run" in str(check(run))

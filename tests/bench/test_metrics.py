"""Latencies and throughput from records, against figures worked out by hand and against the definitions written out."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given, strategies as st

from octavo.bench.metrics import LATENCIES, by_class, by_prompt_length, length_bucket, measure
from octavo.bench.records import RequestRecord


def record(times: list[float], *, sent: float = 0.0, prompt: int = 10, reason: str = "length", **fields: Any) -> RequestRecord:
    given = {"index": 0, "max_tokens": max(1, len(times)), "due": sent, "ended": times[-1] if times else sent} | fields
    return RequestRecord(num_prompt_tokens=prompt, sent=sent, token_times=times, finish_reason=reason, **given)


def test_by_hand() -> None:
    """Two requests; the second's last two tokens came together."""
    one = record([1.0, 1.5, 2.5], sent=0.5, first_scheduled=0.75, num_cached_tokens=4)
    two = record([3.0, 4.0, 6.0, 6.0], sent=1.0, due=0.5, prompt=20, first_scheduled=2.0, num_preemptions=1)
    found = measure([one, two])
    assert (found.requests, found.succeeded, found.failures, found.duration) == (2, 2, {}, 6.0)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens, found.preemptions) == (30, 7, 4, 1)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (2 / 6, 7 / 6, 37 / 6)
    expected = {
        "queue": [0.25, 1.0],
        "ttft": [0.5, 2.0],
        "tpot": [0.75, 1.0],
        "itl": [0.5, 1.0, 1.0, 2.0],
        "token_gap": [0.0, 0.5, 1.0, 1.0, 2.0],
        "e2el": [2.0, 5.0],
        "normalized": [2 / 3, 5 / 4],
        "send_lag": [0.0, 0.5],
    }
    assert {name: getattr(found, name).values for name in expected} == expected


@given(st.lists(st.lists(st.floats(0.001, 10), min_size=2, max_size=9), min_size=1, max_size=9))
def test_first_token_and_gaps_are_the_end_to_end_latency(gaps: list[list[float]]) -> None:
    """TTFT + TPOT x (tokens - 1) = TTFT + the sum of the ITLs = end to end, for each request."""
    for own in gaps:
        times = [sum(own[: n + 1]) for n in range(len(own))]
        found = measure([record(times)])
        assert found.e2el.mean == pytest.approx(found.ttft.mean + sum(found.itl.values))
        assert found.e2el.mean == pytest.approx(found.ttft.mean + found.tpot.mean * (len(times) - 1))
        assert found.normalized.mean == pytest.approx(found.e2el.mean / len(times))


def test_failures_stay_in_the_denominator() -> None:
    """Three of four fail: medians are infinite where a failure had no value, its tokens are no throughput, and its reason is counted."""
    good = record([1.0, 2.0], first_scheduled=0.5)
    refused = record([], reason="refused", error="too long", ended=0.0)
    late = record([1.0, 4.0], reason="timeout", ended=8.0, first_scheduled=0.5)
    lost = record([], reason="", error="not sent", ended=0.0)
    found = measure([good, refused, late, lost])
    assert (found.requests, found.succeeded) == (4, 1)
    assert found.failures == {"refused": 1, "timeout": 1, "unanswered": 1}
    assert (found.output_tokens, found.duration, found.output_throughput) == (2, 8.0, 0.25)
    assert found.ttft.median == found.e2el.median == found.tpot.median == found.queue.percentile(99) == math.inf
    assert found.ttft.percentile(30) == 1.0 and found.e2el.mean == 2.0
    assert found.itl.values == [1.0, 3.0]  # the gaps that somebody saw


def test_what_is_unknown_is_empty() -> None:
    """Over HTTP nobody sees the queue; a single token has no gap; without records nothing is measured."""
    found = measure([record([1.0])])
    assert (len(found.queue), found.queue.missing, len(found.tpot), len(found.itl)) == (0, 0, 0, 0)
    assert math.isnan(found.tpot.mean)
    empty = measure([])
    assert (empty.requests, empty.duration, empty.request_throughput) == (0, 0.0, 0.0)
    assert all(math.isnan(getattr(empty, name).mean) for name in LATENCIES)


def test_tokens_that_a_server_counts() -> None:
    """Where an event brings several tokens and no ids, its time stands once; TPOT divides by the tokens all the same."""
    found = measure([record([1.0, 3.0], num_counted=5)])
    assert (found.output_tokens, found.tpot.values, found.itl.values, found.normalized.values) == (5, [0.5], [2.0], [0.6])


def test_groups_have_the_duration_of_the_run() -> None:
    """Throughputs of classes add up to that of all."""
    records = [
        record([n + 1.0, n + 2.0], sent=float(n), prompt=length, class_name="chat" if n % 2 else "batch")
        for n, length in enumerate((1, 16, 17, 32, 33, 5000))
    ]
    whole = measure(records)
    for groups in (by_class(records), by_prompt_length(records)):
        assert sum(group.requests for group in groups.values()) == 6
        assert math.isclose(sum(group.output_throughput for group in groups.values()), whole.output_throughput)
    assert list(by_class(records)) == ["batch", "chat"]
    assert list(by_prompt_length(records)) == ["1-16", "17-32", "33-64", "4097-8192"]


@given(st.integers(1, 1 << 20))
def test_a_length_is_in_its_bucket(length: int) -> None:
    """Between the two numbers of its name."""
    low, high = map(int, length_bucket(length).split("-"))
    assert low <= length <= high


@given(st.lists(st.floats(0.01, 9), min_size=3, max_size=30))
def test_the_mean_is_of_all_requests(lengths: list[float]) -> None:
    """Against the statistics module."""
    found = measure([record([length]) for length in lengths])
    assert found.ttft.mean == pytest.approx(statistics.fmean(lengths))

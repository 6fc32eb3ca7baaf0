"""The table of `vllm bench serve`, with the literal numbers of requirement B1."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from octavo.bench.distribution import Distribution
from octavo.bench.metrics import Metrics, measure
from octavo.bench.records import RequestRecord
from octavo.bench.serving_table import as_json, group_table, serving_table

EMPTY = measure([])


def thousand() -> list[RequestRecord]:
    """1,000 requests that end after 66.09233 s, 1,024 tokens in each, 127,598 out in all."""
    outputs = [127 + (n < 598) for n in range(1000)]
    return [
        RequestRecord(
            index=n, num_prompt_tokens=1024, max_tokens=made, due=0.0, sent=0.0, ended=66.09233, finish_reason="length",
            token_times=[66.09233 * (k + 1) / made for k in range(made)],
        )
        for n, made in enumerate(outputs)
    ]  # fmt: skip


def test_the_literal_table() -> None:
    """B1: 1,000 requests, 66.09233 s, 1,024,000 in, 127,598 out print 15.13, 1930.60 and 17424.08, under these names and sections."""
    lines = serving_table(measure(thousand())).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1:8] == [
        "Successful requests:                     1000",
        "Benchmark duration (s):                  66.09",
        "Total input tokens:                      1024000",
        "Total generated tokens:                  127598",
        "Request throughput (req/s):              15.13",
        "Output token throughput (tok/s):         1930.60",
        "Total Token throughput (tok/s):          17424.08",
    ]
    titles = [line.strip("-") for line in lines if line.startswith("-")]
    assert titles == ["Time to First Token", "Time per Output Token (excl. 1st token)", "Inter-token Latency", "End-to-end Latency"]
    names = [line.partition(":")[0] for line in lines[9:-1] if not line.startswith("-")]
    assert names[:3] == ["Mean TTFT (ms)", "Median TTFT (ms)", "P99 TTFT (ms)"]
    assert names[-3:] == ["Mean E2EL (ms)", "Median E2EL (ms)", "P99 E2EL (ms)"] and len(names) == 12
    assert lines[-3:-1] == ["Median E2EL (ms):                        66092.33", "P99 E2EL (ms):                           66092.33"]
    assert lines[-1] == "=" * 50 and "Failed requests" not in serving_table(measure(thousand()))


def test_milliseconds() -> None:
    """Of seconds, with the percentiles asked for."""
    metrics: Metrics = replace(EMPTY, queue=Distribution([0.001, 0.003], missing=0))
    table = serving_table(metrics, sections=["queue", "ttft"], percentiles=[50, 99.9])
    assert "Mean Queue (ms):                         2.00\nMedian Queue (ms):                       2.00\nP50 Queue (ms): " in table
    assert "P99.9 Queue (ms):                        3.00" in table
    assert "---------------Time to First Token----------------\nnone measured\n" in table
    with pytest.raises(KeyError):
        serving_table(metrics, sections=["speed"])


def test_groups() -> None:
    """Of each all latencies, with mean, P50, P95 and P99 in ms; "-" for what nobody saw."""
    metrics = replace(
        EMPTY, requests=5, succeeded=4, duration=2.0, output_tokens=25,
        queue=Distribution([0.001, 0.003]), ttft=Distribution([0.01] * 99 + [0.02]), e2el=Distribution([1.0], missing=1),
    )  # fmt: skip
    heads, *lines = [line.split() for line in group_table("class", {"chat": metrics}).splitlines()]
    assert heads == ["class", "requests", "failed", "tok/s", "ms", "mean", "P50", "P95", "P99"]
    assert {line[4]: line[5:] for line in lines} == {
        "Queue": ["2.0", "2.0", "2.9", "3.0"],
        "TTFT": ["10.1", "10.0", "10.0", "10.1"],
        "TPOT": ["-"] * 4,
        "ITL": ["-"] * 4,
        "E2EL": ["1000.0", "inf", "inf", "inf"],
    }
    assert {tuple(line[:4]) for line in lines} == {("chat", "5", "1", "12.5")}


def test_failures_and_settings_are_listed() -> None:
    """By their reasons; a percentile that reaches failures is infinite, and null in JSON, which knows no infinity."""
    failed = [
        RequestRecord(index=0, num_prompt_tokens=1, max_tokens=1, due=0.0, sent=0.0, ended=1.0, finish_reason=reason)
        for reason in ("refused", "timeout", "timeout")
    ]
    metrics = measure([*thousand()[:3], *failed])
    table = serving_table(metrics, settings=[("Request rate (req/s)", "20")])
    assert [line.split() for line in table.splitlines()[2:5]] == [["Failed", "requests:", "3"], ["refused:", "1"], ["timeout:", "2"]]
    assert "Request rate (req/s):                    20\n" in table
    assert "P99 TTFT (ms):                           inf" in table
    found = json.loads(json.dumps(as_json(metrics), allow_nan=False))
    assert (found["completed"], found["failed"], found["p99_ttft_ms"]) == (3, 3, None)
    assert found["mean_ttft_ms"] > 0 and found["total_input_tokens"] == 3072

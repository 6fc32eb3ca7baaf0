"""GET /metrics: every number agrees with what came out, by an independent parser."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import OutOfMemoryError
from octavo.server.tallies import Histogram, one_two_five
from tests.models import tiny
from tests.server.observed import Running, Samples, die, run, samples, serving, value

VLLM = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc",
    "counter": "num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_total generation_tokens_total",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds "
    "iteration_tokens_total request_prompt_tokens request_generation_tokens request_params_max_tokens request_params_n",
}
"""Names of vLLM's V1 engine (vllm/v1/metrics/loggers.py), as its dashboards ask for them."""


@pytest.fixture(scope="session")
def folder() -> Path:
    """A folder of the tiny model."""
    return tiny("llama_gqa")


@pytest.mark.parametrize("prefix", ["octavo", "vllm"])
def test_names_and_labels_are_those_of_vllm(folder: Path, prefix: str) -> None:
    """Each name is there from the start, with labels model_name and engine, under either prefix; reasons are a label."""

    async def test() -> None:
        async with serving(folder, server={"metrics_prefix": prefix}) as server:
            text = (await server.client.get("/metrics")).text
            lines = [line for line in text.splitlines() if line.startswith(f"{prefix}:")]
            assert all('model_name="tiny"' in line and 'engine="0"' in line for line in lines)
            there = {line.partition("{")[0].removeprefix(f"{prefix}:") for line in lines}
            wanted = {*VLLM["gauge"].split(), *VLLM["counter"].split()}
            wanted |= {f"{name}_{part}" for name in VLLM["histogram"].split() for part in ("bucket", "sum", "count")}
            assert wanted <= there, wanted - there
            for reason in ("stop", "length", "abort", "timeout", "error"):
                assert any("request_success_total" in line and f'finished_reason="{reason}"' in line for line in lines)
            assert ("vllm:" if prefix == "octavo" else "octavo:") not in text
            kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith(f"# TYPE {prefix}:"))
            for kind, names in VLLM.items():
                assert {kinds[f"{prefix}:{name}"] for name in names.split()} == {kind}

    run(test())


@pytest.mark.parametrize("version", ["0.0.1", "1.0.0"])
def test_names_keep_their_colon_whatever_is_accepted(folder: Path, version: str) -> None:
    """Prometheus asks for OpenMetrics first, where the client library would change the names."""

    async def test() -> None:
        async with serving(folder) as server:
            accepted = f"application/openmetrics-text;version={version};q=0.9,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
            answer = await server.client.get("/metrics", headers={"Accept": accepted})
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert value(samples(answer.text), "octavo:generation_tokens_total") == 0

    run(test())


def consistent(server: Running, found: Samples) -> None:
    """What must hold between metrics and answers whenever nothing runs."""
    answers, reports = server.answers, [report for report in server.reports if not report.error]
    reasons = Counter(
        next(r for r in ("error", "timeout", "abort", "length", "stop") if r in {o.finish_reason for o in a.outputs}) for a in answers
    )
    for reason in ("stop", "length", "abort", "timeout", "error"):
        assert value(found, "octavo:request_success_total", finished_reason=reason) == reasons[reason]
    assert value(found, "octavo:requests_total") == len(answers)
    made = [token for answer in answers for output in answer.outputs for token in output.token_ids]
    assert value(found, "octavo:generation_tokens_total") == len(made)
    begun = [a for a in answers if a.times is not None and a.times.first_token is not None]
    assert value(found, "octavo:prompt_tokens_total") == sum(a.num_prompt_tokens for a in begun)
    assert value(found, "octavo:num_preemptions_total") == sum(a.num_preemptions for a in answers)
    assert value(found, "octavo:time_to_first_token_seconds_count") == len(begun)
    assert value(found, "octavo:time_to_first_token_seconds_sum") == pytest.approx(
        sum(a.times.first_token - a.times.arrival for a in begun if a.times and a.times.first_token)
    )
    answered = [a for a in answers if {o.finish_reason for o in a.outputs} <= {"stop", "length"}]
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_decode_time_seconds"):
        assert value(found, f"octavo:{name}_count") == len(answered)
    parts = [value(found, f"octavo:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert value(found, "octavo:e2e_request_latency_seconds_sum") == pytest.approx(sum(parts))
    assert value(found, "octavo:request_generation_tokens_sum") == sum(len(o.token_ids) for a in answered for o in a.outputs)
    assert value(found, "octavo:iteration_tokens_total_sum") == sum(r.num_tokens for r in reports)
    assert value(found, "octavo:step_rows_sum") == sum(r.num_rows for r in reports)
    assert value(found, "octavo:step_rows_count") == value(found, "octavo:steps_total")
    forward = value(found, "octavo:step_time_seconds_total", part="forward")
    assert forward == pytest.approx(sum(r.seconds.get("forward", 0.0) for r in reports)) and forward > 0
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc", "http_requests_active")
    assert [value(found, f"octavo:{name}") for name in gauges] == [0] * 5
    kinds = [value(found, "octavo:kv_slots", kind=kind) for kind in ("filled", "held", "external", "cached", "free")]
    assert sum(kinds) == server.here.llm.built.engine.kv.capacity and kinds[:2] == [0, 0]


def test_numbers_are_those_of_the_answers(folder: Path) -> None:
    """Mixed work on a pool that is too small, with preemptions, samples, timeouts, aborts, refusals: none missing or counted twice."""

    async def test() -> None:
        async with serving(folder, max_model_len=48, num_kv_slots=64) as server:
            calls = [server.complete([i, *range(13)], max_tokens=20, stream=bool(i % 2)) for i in range(5)]
            calls += [server.complete([7, 7, i], n=2, temperature=1.0, seed=i, max_tokens=4) for i in range(2)]
            calls += [server.complete([5, 5], max_tokens=40, timeout_s=0.001)]
            calls += [server.complete([1] * 200), server.complete([1], n=0)]
            leaver = asyncio.create_task(server.complete([9, 9], max_tokens=40))
            answers = asyncio.gather(*calls)
            while not server.reports:
                await asyncio.sleep(0.001)
            leaver.cancel()
            statuses = Counter(answer.status_code for answer in await answers)
            assert statuses[400] == 2 and statuses[200] == 7 and statuses[408] == 1
            await server.idle()
            found = await server.metrics()
            consistent(server, found)
            assert value(found, "octavo:num_preemptions_total") > 0, "the case did not occur"
            assert value(found, "octavo:request_success_total", finished_reason="timeout") > 0
            assert value(found, "octavo:request_params_n_bucket", le="1.0") == 5
            assert (
                sum(v for (name, labels), v in found.items() if name == "octavo:http_requests_total" and ("status", "400") in labels) == 2
            )

    run(test())


def test_gaps_between_tokens_are_counted_by_sequence(folder: Path) -> None:
    """A sequence of k tokens has k - 1 gaps, and they add up to the time from its first token to its last."""

    async def test() -> None:
        async with serving(folder) as server:
            await asyncio.gather(
                *(server.complete([i, 1, 2], max_tokens=5 + i) for i in range(4)), server.complete([3], n=3, temperature=1.0)
            )
            found = await server.metrics()
            made = [len(output.token_ids) for answer in server.answers for output in answer.outputs]
            for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
                assert value(found, f"octavo:{name}_count") == sum(made) - len(made)
            gaps = [gap for report in server.reports for gap, count in report.token_gaps.items() for _ in range(count)]
            assert value(found, "octavo:inter_token_latency_seconds_sum") == pytest.approx(sum(gaps))
            times = [answer.times for answer in server.answers if answer.times is not None]
            first = min(time.first_token for time in times if time.first_token is not None)
            last = max(time.finished for time in times if time.finished is not None)
            assert 0 < sum(gaps) <= len(made) * (last - first)

    run(test())


@pytest.mark.parametrize("allocator", ["prefix", "paged", "contiguous"])
def test_cached_blocks_are_not_in_use(folder: Path, allocator: str) -> None:
    """An idle engine shows 0, whatever it keeps for reuse; also right after an abort, which no step follows (known fault 44)."""

    async def test() -> None:
        block = {} if allocator == "contiguous" else {"block_size": 4}
        settings = {"allocator": allocator, "block_size": None, **block}
        async with serving(folder, **settings) as server:
            for _ in range(2):
                await server.complete(list(range(40)))
            task = asyncio.create_task(server.complete([1, 2, 3], max_tokens=100))
            while not server.here.llm.built.engine.requests:
                await asyncio.sleep(0.001)
            during = await server.metrics()
            assert value(during, "octavo:num_requests_running") == 1 and value(during, "octavo:kv_cache_usage_perc") > 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.idle()
            found = await server.metrics()
            assert value(found, "octavo:kv_cache_usage_perc") == value(found, "octavo:gpu_cache_usage_perc") == 0
            cached = value(found, "octavo:kv_slots", kind="cached")
            assert (cached >= 40) == (allocator == "prefix")
            assert value(found, "octavo:prefix_cache_hits_total") == (36 if allocator == "prefix" else 0)
            assert ("octavo:kv_blocks", (("state", "used"),)) in found or allocator == "contiguous"

    run(test())


def test_classes_have_numbers_of_their_own(folder: Path, tmp_path: Path) -> None:
    """Where classes are configured, and then of all: together they are the whole. vLLM's names have no label more than elsewhere."""
    config = tmp_path / "classes.toml"
    config.write_text("[scheduler.classes.batch]\nmax_running = 1\n[scheduler.classes.hasty]\ntimeout_s = 0.001\n")

    async def test() -> None:
        async with serving(folder, config=config) as server:
            batch = [server.complete([i, 1, 2], max_tokens=40, headers={"X-Octavo-Class": "batch"}) for i in range(4)]
            tasks = [asyncio.create_task(one) for one in batch]
            while len(server.here.llm.built.engine.requests) < 4 or not server.reports:
                await asyncio.sleep(0.001)
            during = await server.metrics()
            assert value(during, "octavo:class_requests_running", **{"class": "batch"}) == 1
            assert value(during, "octavo:class_requests_waiting", **{"class": "batch"}) == value(during, "octavo:num_requests_waiting") > 0
            others = [server.complete([9, 9], headers={"X-Octavo-Class": "hasty"}, max_tokens=100), server.complete([3, 4])]
            await asyncio.gather(*tasks, *others)
            found = await server.metrics()
            consistent(server, found)
            ended = {
                (name, reason): 0 for name in ("batch", "default", "hasty") for reason in ("stop", "length", "abort", "timeout", "error")
            }
            ended |= {("batch", "length"): 4, ("default", "length"): 1, ("hasty", "timeout"): 1}
            for (name, reason), count in ended.items():
                assert value(found, "octavo:class_requests_ended_total", finished_reason=reason, **{"class": name}) == count
            for name, whole in (
                ("class_e2e_request_latency_seconds", "e2e_request_latency_seconds"),
                ("class_time_to_first_token_seconds", ""),
            ):
                counts = [value(found, f"octavo:{name}_count", **{"class": one}) for one in ("batch", "default", "hasty")]
                sums = [value(found, f"octavo:{name}_sum", **{"class": one}) for one in ("batch", "default", "hasty")]
                assert counts == [4, 1, 0]
                assert not whole or sum(sums) == pytest.approx(value(found, f"octavo:{whole}_sum"))
            assert {labels for name, labels in found if name == "octavo:e2e_request_latency_seconds_count"} == {()}
        async with serving(folder) as server:
            assert not any("class" in name for name, _ in await server.metrics())

    run(test())


def test_a_step_out_of_memory_and_a_failed_one_are_counted(folder: Path) -> None:
    """Apart from each other; the requests of the second are errors, and nothing that was counted goes down."""

    async def test() -> None:
        async with serving(folder) as server:
            engine = server.here.llm.built.engine
            await server.complete([1, 2, 3])
            before = await server.metrics()
            submit, failures = engine.runner.submit, [OutOfMemoryError("full"), RuntimeError("broken kernel")]

            def failing(plan: Any) -> Any:
                if len(failures) == 1 or (failures and len(plan.chunks) > 1):
                    raise failures.pop(0)
                return submit(plan)

            engine.runner.submit = failing  # type: ignore[method-assign]
            await asyncio.gather(*(server.complete([i, 2], max_tokens=20) for i in range(4)))
            found = await server.metrics()
            consistent(server, found)
            assert value(found, "octavo:out_of_memory_steps_total") == value(found, "octavo:failed_steps_total") == 1
            assert value(found, "octavo:request_success_total", finished_reason="error") >= 1
            for (name, labels), old in before.items():
                if name.endswith(("_total", "_count", "_bucket", "_sum")):
                    assert found[name, labels] >= old, name

    run(test())


def test_a_dead_engine_still_has_metrics(folder: Path) -> None:
    """The last numbers, and engine_alive 0."""

    async def test() -> None:
        async with serving(folder) as server:
            await server.complete([1, 2, 3])
            server.here.llm.engine_loop.post(die)
            while server.here.llm.engine_loop.alive:
                await asyncio.sleep(0.01)
            found = await server.metrics()
            assert value(found, "octavo:engine_alive") == 0 and value(found, "octavo:generation_tokens_total") == 8

    run(test())


def test_drafts_are_counted(folder: Path) -> None:
    """Checked and accepted ones, under vLLM's names; tokens are those of the answers all the same."""

    async def test() -> None:
        async with serving(folder, speculative_config={"num_speculative_tokens": 3, "prompt_lookup_min": 1}) as server:
            for i in range(4):
                await server.complete([i, 5, 6, 7] * 6, max_tokens=40)
            found = await server.metrics()
            consistent(server, found)
            drafted = value(found, "octavo:spec_decode_num_draft_tokens_total")
            assert drafted == sum(report.num_drafted for report in server.reports) > 0
            assert value(found, "octavo:spec_decode_num_accepted_tokens_total") == sum(report.num_accepted for report in server.reports)

    run(test())


def test_two_servers_in_a_process_do_not_meet(folder: Path) -> None:
    """Each has a registry of its own."""

    async def test() -> None:
        async with serving(folder) as one, serving(folder) as other:
            await one.complete([1, 2, 3])
            assert value(await one.metrics(), "octavo:generation_tokens_total") == 8
            assert value(await other.metrics(), "octavo:generation_tokens_total") == 0

    run(test())


def test_histograms_take_values_many_times() -> None:
    """On a bound counts below it, as Prometheus' `le` says; above all bounds counts in the last."""
    histogram = Histogram((1, 2, 5))
    for seen, count in ((1, 3), (1.5, 1), (5, 2), (6, 4)):
        histogram.observe(seen, count)
    assert histogram.counts == [3, 1, 2, 4] and histogram.total == 3 + 1.5 + 10 + 24
    assert one_two_five(128) == (1, 2, 5, 10, 20, 50, 100) and one_two_five(1) == (1,)

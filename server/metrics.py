"""GET /metrics: all numbers in Prometheus' form. Names and labels are vLLM's where it has the same number, so that dashboards work.

Must not know: how the numbers come about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from octavo.core.kv import KVUsage
from octavo.server.logs import DroppingHandler
from octavo.server.served import Served, served
from octavo.server.tallies import ClassTally, Histogram, Reading

router = APIRouter()
# Not OpenMetrics, for whoever asks for that: the client library writes a colon in a name as an underscore there, and Prometheus would
# store other names than dashboards ask for.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SLOT_KINDS = ("filled", "held", "external", "cached", "free", "host")

GAUGES: tuple[tuple[str, str, Callable[[Reading], float]], ...] = (
    ("num_requests_running", "Requests that the scheduler runs.", lambda r: r.running),
    ("num_requests_waiting", "Requests that wait for the scheduler.", lambda r: r.waiting),
    ("kv_cache_usage_perc", "Share of the KV pool that live sequences hold; 1 is all. What is cached is not in use.", lambda r: r.kv_usage),
    ("gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", lambda r: r.kv_usage),
    (
        "max_num_seqs",
        "Most sequences that may run at once; lowered while device memory is short.",
        lambda r: r.max_num_seqs,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[Reading], float]], ...] = (
    ("requests", "Requests that the engine took.", lambda r: r.requests),
    ("num_preemptions", "Requests taken off to make room for others.", lambda r: r.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda r: r.stats.queried_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda r: r.stats.hit_tokens),
    ("prefix_cache_evictions", "Cached blocks given up for room.", lambda r: r.stats.evictions),
    ("kv_copies", "Blocks or regions copied because a shared one was about to be written.", lambda r: r.stats.copies),
    ("prompt_tokens", "Prompt tokens of requests that have their first token.", lambda r: r.prompt_tokens),
    ("generation_tokens", "Tokens generated, each once, however often its KV was computed.", lambda r: r.generated_tokens),
    ("spec_decode_num_draft_tokens", "Tokens guessed by speculative decoding and checked.", lambda r: r.drafted),
    ("spec_decode_num_accepted_tokens", "Of these, tokens that the model would have chosen itself.", lambda r: r.accepted),
    ("steps", "Steps that ran.", lambda r: r.steps),
    ("idle_row_steps", "Rows of batches that produced nothing, by step.", lambda r: r.idle_rows),
    ("out_of_memory_steps", "Steps that ran out of device memory, were undone and planned again, smaller.", lambda r: r.out_of_memory),
)
HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "From a sequence's tokens to its next ones.",
    "e2e_request_latency_seconds": "From arrival to the end of answered requests.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the end.",
    "request_inference_time_seconds": "From the first step to the end.",
    "request_time_per_output_token_seconds": "Mean time of a request's tokens after its first.",
    "request_prompt_tokens": "Prompt tokens of answered requests.",
    "request_generation_tokens": "Tokens of the answers.",
    "request_params_max_tokens": "max_tokens of answered requests that set it.",
    "request_params_n": "n of answered requests.",
    "iteration_tokens_total": "Tokens of a step, those computed again included.",
    "step_rows": "Rows of a step; sum / count is the mean batch.",
}
OLDER_NAMES = {"time_per_output_token_seconds": "inter_token_latency_seconds"}


class Collector:
    """Makes the metrics of one server from the reading that it was given last."""

    def __init__(self, here: Served, *, prefix: str) -> None:
        self.reading: Reading | None = None
        self._here = here
        self._prefix = prefix
        self._labels = {"model_name": here.model_names[0], "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        reading, here = self.reading, self._here
        if reading is None:
            return
        for name, what, value in GAUGES:
            yield self._gauge(name, what, {(): value(reading)})
        for name, what, value in COUNTERS:
            yield self._counter(name, what, {(): value(reading)})
        for name, what in HISTOGRAMS.items():
            yield self._histogram(name, what, {(): reading.histograms[name]})
        for older, name in OLDER_NAMES.items():
            yield self._histogram(older, f"The older name of {name}.", {(): reading.histograms[name]})
        block_size = here.llm.built.engine.kv.block_size
        slots = {(kind,): getattr(reading.usage, kind) for kind in SLOT_KINDS}
        yield self._counter("request_success", "Requests that ended, by reason.", _by(reading.ended), "finished_reason")
        yield self._gauge("kv_slots", "Slots of the KV pool by what they hold; all but host add up to it.", slots, "kind")
        if block_size:
            yield self._gauge("kv_blocks", "Blocks of the KV pool by state.", _by(blocks_by_state(reading.usage, block_size)), "state")
        yield self._counter("kv_transfer_slots", "Slots copied within the pool, moved out and in.", _by(reading.transferred), "kind")
        yield self._counter("step_time_seconds", "Time of steps by part.", _by(reading.seconds), "part")
        loop = here.llm.engine_loop
        yield self._counter("failed_steps", "Steps that failed for another reason than memory.", {(): loop.num_failed_steps})
        yield self._gauge("step_age_seconds", "How long the step that runs now has taken.", {(): loop.stalled_for()})
        threads = {(): float(here.llm.built.num_threads)}
        yield self._gauge("compute_threads", "Threads that the engine computes with on the CPU.", threads)
        yield self._gauge("engine_alive", "1 while the engine takes requests.", {(): float(loop.alive)})
        yield self._gauge("http_requests_active", "HTTP requests not answered yet.", {(): here.num_active})
        yield self._counter("http_requests", "HTTP requests answered.", here.access_log.answered, "method", "handler", "status")
        yield self._counter("log_lines_dropped", "Lines that could not be written to the log.", {(): DroppingHandler.num_dropped})
        yield self._cache_config()
        if reading.classes:
            yield from self._by_class(reading.classes)

    def _by_class(self, classes: dict[str, ClassTally]) -> Iterator[Metric]:
        """Under names of their own: a label more under vLLM's would split the lines of dashboards that know none."""
        ended = {(name, reason): count for name, tally in classes.items() for reason, count in tally.ended.items()}
        running, waiting = _by({name: t.running for name, t in classes.items()}), _by({name: t.waiting for name, t in classes.items()})
        first, latency = _by({name: t.first_token for name, t in classes.items()}), _by({name: t.latency for name, t in classes.items()})
        yield self._gauge("class_requests_running", "Requests that the scheduler runs, by class.", running, "class")
        yield self._gauge("class_requests_waiting", "Requests that wait for the scheduler, by class.", waiting, "class")
        yield self._counter("class_requests_ended", "Requests that ended, by class and reason.", ended, "class", "finished_reason")
        yield self._histogram("class_time_to_first_token_seconds", "Of answered requests, by class.", first, "class")
        yield self._histogram("class_e2e_request_latency_seconds", "Of answered requests, by class.", latency, "class")

    def _cache_config(self) -> Metric:
        """The KV pool's settings as labels, under the names that vLLM has for them."""
        built = self._here.llm.built
        told = {
            "block_size": built.engine.kv.block_size,
            "cache_dtype": built.loaded.facts.kv_dtype,
            "enable_prefix_caching": built.config.stack.allocator.name == "prefix",
            "gpu_memory_utilization": built.config.engine.gpu_memory_utilization,
            "num_cpu_blocks": built.engine.kv.host_capacity // max(1, built.engine.kv.block_size),
            "num_gpu_blocks": built.engine.kv.capacity // max(1, built.engine.kv.block_size),
        }
        values = {tuple(map(str, told.values())): 1.0}
        return self._gauge("cache_config_info", "Settings of the KV pool.", values, *told)

    # ------------------------------------------------------------------- families

    def _counter(self, name: str, what: str, values: dict[Any, Any], *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(self._prefix + name, what, labels=[*self._labels, *labels]), values)

    def _gauge(self, name: str, what: str, values: dict[Any, Any], *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(self._prefix + name, what, labels=[*self._labels, *labels]), values)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: dict[Any, Any]) -> Metric:
        for labels, value in values.items():
            family.add_metric([*self._labels.values(), *labels], value)
        return family

    def _histogram(self, name: str, what: str, values: dict[Any, Histogram], *labels: str) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, what, labels=[*self._labels, *labels])
        for of_labels, histogram in values.items():
            bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
            family.add_metric([*self._labels.values(), *of_labels], buckets, histogram.total)
        return family


def _by(values: dict[str, Any]) -> dict[tuple[str], Any]:
    return {(label,): value for label, value in values.items()}


def blocks_by_state(usage: KVUsage, block_size: int) -> dict[str, int]:
    """used: live sequences hold them; cached: kept for reuse, as good as free; free; host: in host memory."""
    slots = {"used": usage.filled + usage.held, "cached": usage.cached, "free": usage.free + usage.external, "host": usage.host}
    return {state: count // block_size for state, count in slots.items()}


def make_registry(here: Served) -> tuple[CollectorRegistry, Collector]:
    """A registry of this server alone: two servers in one process do not meet."""
    registry, collector = CollectorRegistry(), Collector(here, prefix=f"{here.settings.metrics_prefix}:")
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry, collector


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus. Open to everybody, as probes are: it holds numbers alone."""
    reading = await served(request).read()
    registry, collector = request.app.state.metrics
    collector.reading = reading
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE})

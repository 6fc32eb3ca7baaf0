"""`diagnose`: two readings of a server's metrics become judgements, each with its figures and the knob to turn.

For Octavo and for vLLM: both have these names, under prefixes of their own. Must not know: how metrics are made, command lines.
"""

from __future__ import annotations

import http.client
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from octavo.core.errors import OctavoError

PREFIXES = ("octavo:", "vllm:")
TIMEOUT_S = 10.0  # for one reading, all in all
MOST_BYTES = 16 * 2**20

FULL = 0.95  # of the pool, both times: saturated
ROOMY = 0.8  # of the pool; below, memory is not what requests wait for
LOW_HITS = 0.1
FEW_TOKENS = 1000  # looked up; of fewer, a hit rate says nothing


class UnreadableError(OctavoError):
    """There are no metrics to be read at this address."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading: sums over engines and models of a server; of shares, the largest."""

    prefix: str
    totals: dict[str, float]
    largest: dict[str, float]

    def total(self, *names: str) -> float:
        """Of the first name that is there; 0 if none is."""
        return next((self.totals[name] for name in names if name in self.totals), 0.0)

    @property
    def usage(self) -> float | None:
        """Share of the KV pool in use."""
        return self.largest.get("kv_cache_usage_perc", self.largest.get("gpu_cache_usage_perc"))


@dataclass(frozen=True, slots=True)
class Finding:
    """A judgement."""

    name: str
    figures: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and one line on how the server does."""

    summary: str
    findings: list[Finding] = field(default_factory=list)


def metrics_url(given: str) -> str:
    """The address of the metrics of a server that was named in any usual way. Raises UnreadableError."""
    parts = urlsplit(given if "://" in given else f"http://{given}")
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UnreadableError(f"{given!r} is no address of a server: give one such as http://localhost:8000")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}/metrics"


def fetch(url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """The text at this address; the whole of it comes within the time, or UnreadableError is raised.

    Read in a thread that is left alone when time is up: a socket's own timeout begins anew with every byte.
    """
    came: queue.SimpleQueue[str | UnreadableError] = queue.SimpleQueue()

    def work() -> None:
        try:
            came.put(_read(url, api_key=api_key, timeout_s=timeout_s))
        except UnreadableError as error:
            came.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        answer = came.get(timeout=timeout_s)
    except queue.Empty:
        raise UnreadableError(f"{url} did not answer within {timeout_s:g} s") from None
    if isinstance(answer, UnreadableError):
        raise answer
    return answer


def _read(url: str, *, api_key: str | None, timeout_s: float) -> str:
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        with urllib.request.urlopen(request, timeout=2 * timeout_s) as answer:
            text: bytes = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise UnreadableError(f"{url} answers {error.code} {error.reason}: no metrics there") from error
    except urllib.error.URLError as error:
        raise UnreadableError(f"{url} cannot be reached: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnreadableError(f"{url} cannot be read: {str(error) or type(error).__name__}") from error
    if len(text) > MOST_BYTES:
        raise UnreadableError(f"{url} sends more than {MOST_BYTES >> 20} MiB: these are no metrics")
    return text.decode("utf-8", "replace")


def parse(text: str, *, url: str) -> Metrics:
    """The engine's metrics in the text. Raises UnreadableError if there are none."""
    found: dict[str, tuple[dict[str, float], dict[str, float]]] = {prefix: ({}, {}) for prefix in PREFIXES}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix = next((prefix for prefix in PREFIXES if sample.name.startswith(prefix)), None)
                if prefix is not None and sample.value == sample.value:  # not NaN
                    totals, largest = found[prefix]
                    name = sample.name.removeprefix(prefix)
                    totals[name] = totals.get(name, 0.0) + sample.value
                    largest[name] = max(largest.get(name, sample.value), sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise UnreadableError(f"{url} holds no metrics in Prometheus' form: {error}") from error
    for prefix, (totals, largest) in found.items():
        if "num_requests_running" in totals and "num_requests_waiting" in totals:
            return Metrics(prefix, totals, largest)
    raise UnreadableError(
        f"{url} holds no metrics of Octavo or vLLM ({' or '.join(prefix + 'num_requests_running' for prefix in PREFIXES)})"
    )


def read_twice(url: str, *, interval_s: float, api_key: str | None = None, sleep: Callable[[float], None] = time.sleep) -> Diagnosis:
    """Two readings `interval_s` apart, judged. Raises UnreadableError."""
    first = parse(fetch(url, api_key=api_key), url=url)
    sleep(interval_s)
    return diagnose(first, parse(fetch(url, api_key=api_key), url=url), interval_s=interval_s)


def diagnose(first: Metrics, second: Metrics, *, interval_s: float) -> Diagnosis:
    """Judge two readings of one server."""

    def rise(*names: str) -> float:
        old, new = first.total(*names), second.total(*names)
        return new - old if new >= old else new  # it was started anew in between

    running = max(first.total("num_requests_running"), second.total("num_requests_running"))
    waiting = min(first.total("num_requests_waiting"), second.total("num_requests_waiting"))
    usages = [usage for usage in (first.usage, second.usage) if usage is not None]
    full = min(usages, default=0.0)
    use = f"KV cache {full:.0%} in use" if usages else "KV cache use unknown"
    findings = []
    if waiting > 0 and waiting >= running:
        findings.append(_queueing(running, waiting, full=full if usages else 1.0, use=use, seats=second.totals.get("max_num_seqs")))
    preempted = rise("num_preemptions_total")
    if preempted:
        findings.append(
            Finding(
                "over-committed",
                f"{preempted:.0f} preemptions in {interval_s:g} s with {running:.0f} running, {use}",
                "lower max_num_seqs until preemptions stop, or give the KV cache more memory",
            )
        )
    if usages and full >= FULL:
        findings.append(
            Finding(
                "saturated",
                f"{use} in both readings, {running:.0f} running, {waiting:.0f} waiting",
                "scale out: add a replica, or a device with more memory",
            )
        )
    findings += _hits(first, second, rise)
    short = rise("out_of_memory_steps_total")
    if short:
        findings.append(
            Finding(
                "out of memory",
                f"{short:.0f} steps ran out of device memory in {interval_s:g} s",
                "lower gpu_memory_utilization (or kv_cache_memory), or max_num_batched_tokens",
            )
        )
    generated = rise("generation_tokens_total") / interval_s
    idle = not running and not second.total("num_requests_waiting") and not generated
    state = "idle" if idle else "busy" if findings else "healthy"
    numbers = f"{running:.0f} running, {waiting:.0f} waiting, {generated:.1f} tokens/s, {use}"
    if threads := second.totals.get("compute_threads"):
        numbers += f", {threads:.0f} CPU threads"
    return Diagnosis(f"{state}: {numbers}", findings)


def _queueing(running: float, waiting: float, *, full: float, use: str, seats: float | None) -> Finding:
    """Many wait, few run: for memory, unless all seats are taken while there is room."""
    figures = f"{running:.0f} running, {waiting:.0f} waiting, {use}"
    if seats is not None and running >= 0.9 * seats and full < ROOMY:
        advice = f"raise max_num_seqs (now {seats:.0f}): the KV cache has room for more"
        return Finding("seats taken", figures, advice)
    return Finding(
        "memory-bound",
        figures,
        "raise gpu_memory_utilization (or kv_cache_memory), or lower max_model_len to what requests really need",
    )


def _hits(first: Metrics, second: Metrics, rise: Callable[..., float]) -> list[Finding]:
    """Few hits of a prefix cache that is on: in the interval, or since the start where too little was looked up in it."""
    names = {what: (f"prefix_cache_{what}_total", f"gpu_prefix_cache_{what}_total") for what in ("queries", "hits")}
    looked_up, hits, when = rise(*names["queries"]), rise(*names["hits"]), "between the readings"
    if looked_up < FEW_TOKENS:
        looked_up, hits, when = second.total(*names["queries"]), second.total(*names["hits"]), "since the start"
    if looked_up < FEW_TOKENS or hits >= LOW_HITS * looked_up:
        return []
    return [
        Finding(
            "low prefix hit rate",
            f"{hits:.0f} of {looked_up:.0f} prompt tokens found ({hits / looked_up:.1%}) {when}",
            "put what prompts share at their beginning; if they share nothing, enable_prefix_caching = false saves the hashing",
        )
    ]

"""The books of a server: whether every metric agrees with the others, with `/debug`, and with what clients saw. Asked when all is over.

A client that hung up does not know what became of its request, so what it may have caused is counted apart, and leaves a range.
A metric that no check has looked at is a finding, too. Must not know: engines, how requests are sent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from octavo.bench.load.numbers import Numbers
from octavo.bench.load.process import read

KV_KINDS = ("filled", "held", "external", "cached", "free")  # add up to the pool
OF_ANSWERS = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
)
"""Histograms with one value for each answered request."""
LATENCIES = ("time_to_first_token_seconds", *(name for name in OF_ANSWERS if name.endswith("_seconds")))
SAME = {"gpu_cache_usage_perc": "kv_cache_usage_perc", "time_per_output_token_seconds": "inter_token_latency_seconds"}
ZERO = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "http_requests_active",
    "step_age_seconds",
    "failed_steps_total",
    "out_of_memory_steps_total",
    "log_lines_dropped_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)
NOT_OURS = "process_"  # what the client library says of the process


@dataclass(slots=True)
class Seen:
    """What clients saw, in numbers of requests, tokens and seconds. `perhaps`: of requests whose end they did not wait for."""

    answered: int = 0
    prompt_tokens: int = 0  # of answered requests
    made_tokens: int = 0
    seconds: float = 0.0
    timed_out: int = 0
    timed_out_early: int = 0  # of these, with a status of their own
    refused: int = 0
    perhaps: int = 0
    perhaps_prompt_tokens: int = 0  # of all that were not answered
    perhaps_made_tokens: int = 0
    half: int = 0  # requests that were never sent whole


async def pages(url: str) -> dict[str, Any]:
    """What else the server says of itself, by path."""
    return {path: json.loads((await read(url, path)).body) for path in ("/load", "/debug/kv", "/debug/flight")}


def audit(before: Numbers, now: Numbers, told: dict[str, Any], seen: Seen, *, seconds: float, clients: int) -> list[str]:
    """What does not add up of what was counted since `before`, in which `clients` were busy for so long, and the `pages` told now."""
    found = now.since(before)
    checks = [
        *_idle(found),
        *_pool(now),
        *_requests(found, seen),
        *_tokens(found, seen),
        *_times(found, seen, seconds=seconds, clients=clients),
    ]
    problems = [
        f"{what}: {value:g} is not {_range(low, high)}" for what, value, low, high in checks if not low - 1e-6 <= value <= high + 1e-6
    ]
    problems += _histograms(found)
    problems += _debug(now, told)
    unseen = {name for name in now.samples if not name.startswith(NOT_OURS)} - now.looked_at
    return problems + now.fallen(before) + [f"{name} is looked at by no check" for name in sorted(unseen)]


Check = tuple[str, float, float, float]
"""What it is about, its value, and the lowest and highest that it may be."""


def _equal(what: str, value: float, other: float) -> Check:
    return what, value, other - 1e-9 * abs(other), other + 1e-9 * abs(other)


def _range(low: float, high: float) -> str:
    return f"{low:g}" if math.isclose(low, high, rel_tol=1e-6, abs_tol=1e-6) else f"from {low:g} to {high:g}"


def _idle(found: Numbers) -> Iterator[Check]:
    for name in ZERO:
        yield _equal(name, found[name], 0)
    for older, name in SAME.items():
        if name in found.samples:
            yield _equal(f"{older} and {name}", found[older], found[name])
    yield _equal("engine_alive", found["engine_alive"], 1)
    yield "max_num_seqs", found["max_num_seqs"], 1, math.inf
    if "compute_threads" in found.samples:
        yield "compute_threads and cores", found["compute_threads"], 1, os.cpu_count() or math.inf
    yield _equal("cache_config_info", found["cache_config_info"], 1)


def _pool(now: Numbers) -> Iterator[Check]:
    """Slots by kind and blocks by state add up to the pool, and nobody holds any."""
    slots, info = now.by_label("kv_slots"), dict(next(iter(now.samples["cache_config_info"])))
    block_size, blocks = int(info["block_size"]), int(info["num_gpu_blocks"])
    if block_size:
        states = now.by_label("kv_blocks")
        yield _equal("slots of the pool", sum(slots[kind] for kind in KV_KINDS), blocks * block_size)
        yield _equal("blocks of the pool", states["used"] + states["cached"] + states["free"], blocks)
        yield _equal("cached blocks", states["cached"] * block_size, slots["cached"])
        yield _equal("used blocks", states["used"], 0)
        yield _equal("blocks in host memory", states["host"] * block_size, slots["host"])
    for kind in ("filled", "held", "host"):
        yield _equal(f"leaked: slots that are {kind}", slots[kind], 0)


def _requests(found: Numbers, seen: Seen) -> Iterator[Check]:
    """Each request is counted once, by how it ended."""
    ended, statuses = found.by_label("request_success_total"), dict[str, float]()
    for labels, value in found.samples["http_requests_total"].items():
        status = dict(labels)["status"]
        statuses[status] = statuses.get(status, 0.0) + value
    yield _equal("requests taken and ended", found["requests_total"], sum(ended.values()))
    yield "requests taken", found["requests_total"], seen.answered + seen.timed_out, seen.answered + seen.timed_out + seen.perhaps
    yield "requests that ended by length", ended["length"], seen.answered, seen.answered + seen.perhaps
    yield _equal("requests that ended by stop", ended["stop"], 0)
    yield _equal("requests that ended by timeout", ended["timeout"], seen.timed_out)
    yield _equal("requests that failed", ended["error"], 0)
    yield "requests that were aborted", ended["abort"], 0, seen.perhaps
    late = seen.timed_out - seen.timed_out_early
    unsure = seen.perhaps + seen.half
    yield "answers with 200", statuses.pop("200", 0), seen.answered + late, seen.answered + late + seen.perhaps
    yield _equal("answers with 408", statuses.pop("408", 0), seen.timed_out_early)
    yield _equal("answers with 400", statuses.pop("400", 0), seen.refused)
    yield "clients that left", statuses.pop("499", 0), 0, unsure
    yield _equal(f"answers with {', '.join(statuses) or 'another status'}", sum(statuses.values()), 0)
    known = seen.answered + seen.timed_out + seen.refused
    yield "all HTTP requests", found["http_requests_total"], known, known + unsure


def _tokens(found: Numbers, seen: Seen) -> Iterator[Check]:
    """Tokens of prompts and answers, and what steps computed for them."""
    firsts, made, prompts = found["time_to_first_token_seconds_count"], found["generation_tokens_total"], found["prompt_tokens_total"]
    hits, queries = found["prefix_cache_hits_total"], found["prefix_cache_queries_total"]
    asked = seen.prompt_tokens + seen.perhaps_prompt_tokens
    yield "prompt tokens", prompts, seen.prompt_tokens, asked
    yield "prompt tokens of answers", found["request_prompt_tokens_sum"], seen.prompt_tokens, prompts
    yield "tokens of answers", found["request_generation_tokens_sum"], seen.made_tokens, made
    yield "tokens made", made, seen.made_tokens, seen.made_tokens + seen.perhaps_made_tokens
    yield _equal("max_tokens of answers and their tokens", found["request_params_max_tokens_sum"], found["request_generation_tokens_sum"])
    yield "first tokens", firsts, seen.answered, found["requests_total"]
    yield _equal("first tokens, gaps and tokens", firsts + found["inter_token_latency_seconds_count"], made)
    yield "prompt tokens looked up", queries, 0, asked
    yield "prompt tokens found", hits, 0, queries
    yield "blocks evicted", found["prefix_cache_evictions_total"], 0, asked + made
    yield "copies", found["kv_copies_total"], 0, asked + made
    yield "preemptions", found["num_preemptions_total"], 0, found["step_rows_sum"]
    yield _equal("steps and their rows", found["steps_total"], found["step_rows_count"])
    yield _equal("steps and their tokens", found["steps_total"], found["iteration_tokens_total_count"])
    yield "rows of steps", found["step_rows_sum"], max(made, found["steps_total"]), found["iteration_tokens_total_sum"]
    yield "tokens computed", found["iteration_tokens_total_sum"], prompts - hits + made - firsts, math.inf
    yield "rows that made nothing", found["idle_row_steps_total"], 0, found["step_rows_sum"]
    moved = found.by_label("kv_transfer_slots_total")
    yield _equal("slots moved to host memory and back", moved["out"], moved["in"])
    yield "slots copied", moved["copy"], 0, math.inf


def _times(found: Numbers, seen: Seen, *, seconds: float, clients: int) -> Iterator[Check]:
    """One value for each request, parts that add up, and no more time than there was."""
    ended = found.by_label("request_success_total")
    answers = ended["length"] + ended["stop"]
    for name in OF_ANSWERS:
        yield _equal(f"{name} and answers", found[f"{name}_count"], answers)
    yield _equal("n of answers", found["request_params_n_sum"], answers)
    yield "request_time_per_output_token_seconds", found["request_time_per_output_token_seconds_count"], 0, answers
    queue, prefill, decode = (found[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    yield _equal("prefill, decode and inference", found["request_inference_time_seconds_sum"], prefill + decode)
    yield _equal("queue, inference and latency", found["e2e_request_latency_seconds_sum"], queue + prefill + decode)
    yield "latency as clients have it", found["e2e_request_latency_seconds_sum"], 0, seen.seconds + seen.perhaps * seconds
    for name in (*LATENCIES, "inter_token_latency_seconds", "request_time_per_output_token_seconds"):
        yield f"{name}_sum", found[f"{name}_sum"], 0, seconds * clients
    parts = found.by_label("step_time_seconds_total")
    yield "seconds of steps", sum(parts.values()), 0, seconds
    yield "least part of steps", min(parts.values()), 0, seconds


def _histograms(found: Numbers) -> Iterator[str]:
    """Buckets rise to the count, and the sum is one that values in these buckets can have."""
    for name in (name for name, kind in found.kinds.items() if kind == "histogram"):
        buckets = sorted((float(dict(labels)["le"]), value) for labels, value in found.samples[f"{name}_bucket"].items())
        found.looked_at |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
        counts, count, total = [value for _, value in buckets], found[f"{name}_count"], found[f"{name}_sum"]
        if counts != sorted(counts) or counts[-1] != count or buckets[-1][0] != math.inf:
            yield f"{name}: buckets {counts} do not rise to its count {count:g}"
        steps = [(low, high, more - less) for (low, less), (high, more) in pairwise([(0.0, 0.0), *buckets])]
        least = sum(low * number for low, _, number in steps)
        most = sum(high * number for _, high, number in steps if number)
        if not least - 1e-6 <= total <= most + 1e-6:
            yield f"{name}: its sum {total:g} is not {_range(least, most)}, as its buckets say"


def _debug(now: Numbers, told: dict[str, Any]) -> list[str]:
    """What /load, /debug/kv and /debug/flight say of the same."""
    load, pool, flight = told["/load"], told["/debug/kv"], told["/debug/flight"]
    slots = now.by_label("kv_slots")
    problems = [f"/load says {name} {value:g}" for name, value in load.items() if value]
    shown = pool["usage"]
    problems += [f"/debug/kv says {kind} {shown[kind]}, kv_slots {value:g}" for kind, value in slots.items() if value != shown[kind]]
    problems += [f"/debug/kv has a block of {block['owners']}" for block in pool["blocks"] if block["owners"]]
    held, free = sum(block["count"] for block in pool["blocks"]), sum(count for _, count in pool["free"])
    if (held, held + free) != (slots["cached"], pool["capacity"]):
        problems.append(f"/debug/kv: {held} slots in blocks and {free} free, {slots['cached']:g} cached of {pool['capacity']}")
    if flight["in_flight"]:
        problems.append(f"/debug/flight has a step that is not over: {flight['in_flight']}")
    return problems

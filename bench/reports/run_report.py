"""The report of one run: what contradicts itself first, then what was measured, with what, and plots.

Must not know: engines, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from octavo.bench.check_lines import check_lines
from octavo.bench.distribution import Distribution
from octavo.bench.identity import Identity, ServerIdentity
from octavo.bench.markdown import FEW_VALUES, GIB, p99, table, time
from octavo.bench.metrics import Metrics, by_class, by_prompt_length, measure
from octavo.bench.records import RequestRecord
from octavo.bench.reports.doubts import CONTRADICTION, TOO_BUSY, warning
from octavo.bench.reports.drawing import KV_FILLS, PART_FILLS
from octavo.bench.reports.load_plots import latency_curves, queue_and_batch
from octavo.bench.reports.report import Report
from octavo.bench.reports.shares import kv_over_time, kv_shares, share_bars
from octavo.bench.runs import Run
from octavo.bench.self_checks import failed_checks, run_checks
from octavo.bench.stability import in_words, stability

LISTED = 20  # failures that are listed one by one
LATENCIES = {"queue": "queue", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "token_gap": "token gap", "e2el": "end to end"}


def run_report(run: Run, *, plots: bool = True) -> Report:
    """Of one run. Raises ResultError where plots are wanted and matplotlib is not installed."""
    report = Report()
    lines = report.lines
    model = run.identity.model if run.identity else run.settings.get("model", "a server")
    lines += [f"# Run: {run.work.name} on {model}", ""]
    lines += _doubts(run)
    if not run.complete:
        lines += [f"> **Not complete**: {run.stopped_by or 'it was interrupted'}. The figures are of what was done.", ""]
    lines += _parts(run)
    lines += ["## Speed", "", *_speed(measure(run.records)), ""]
    for name, groups in (("class", by_class(run.records)), ("prompt tokens", by_prompt_length(run.records))):
        if len(groups) > 1:
            lines += [*_groups(name, groups), ""]
    if plots and run.records:
        caption = "Cumulative distributions. A failed request counts as infinitely late: the line then ends below 100 %."
        lines += report.figure("latencies", latency_curves({"run": [run]}), caption)
    found = in_words(stability(run))
    lines += ["## Stability", "", *table(list(found), [list(found.values())]), "", *_failures(run.records)]
    if run.steps:
        _pool(report, run, plots=plots)
    else:
        lines += ["No steps: the engine was behind HTTP, where its pool and its batches are out of sight.", ""]
    if run.memory is not None:
        rows = [[name, f"{size / GIB:.3f} GiB", f"{100 * share:.1f} %"] for name, size, share in run.memory.rows]
        lines += ["## Memory", "", *table(["of " + run.memory.device, "size", "share"], rows), ""]
        if run.accounted is not None and run.accounted.saved_slots:
            lines += [f"Sharing spares {run.memory.saving(run.accounted.saved_slots)}.", ""]
    lines += ["## Self-checks", "", *check_lines({"": run_checks(run)}).markdown, ""]
    lines += ["## Measured with", "", *table(["", ""], identity_rows(run.identity, run)), ""]
    return report


def _parts(run: Run) -> list[str]:
    """In how many it was measured, and what that means."""
    if not run.parts:
        return []
    begun = ", ".join(f"{part.date or 'unknown'} (from {part.start:.1f} s)" for part in run.parts)
    cut = sum(len(part.cut_short) for part in run.parts)
    return [
        f"> **Measured in {len(run.parts)} parts**, begun {begun}: between them the clock stands still. A later part begins with an empty "
        f"cache and no request under way. Asked again, since they were under way at a stop: {cut}. Self-checks are of each part.",
        "",
    ]


def _doubts(run: Run) -> list[str]:
    lines = []
    for of_time, said in ((False, CONTRADICTION), (True, TOO_BUSY)):
        failed = [f"{one.check}: {one.problem}" for one in failed_checks(run) if one.of_time is of_time]
        lines += warning(said, failed)
    return lines


def _speed(found: Metrics) -> list[str]:
    rows = [
        ["requests", f"{found.requests}"],
        ["answered", f"{found.succeeded}"],
        ["duration", f"{found.duration:.2f} s"],
        ["requests a second", f"{found.request_throughput:.2f}"],
        ["output tokens a second", f"{found.output_throughput:.1f}"],
        ["all tokens a second", f"{found.total_token_throughput:.1f}"],
        ["prompt tokens from the prefix cache", f"{found.cached_tokens} of {found.input_tokens}"],
        ["preemptions", f"{found.preemptions}"],
    ]
    return [*table(["", ""], rows), "", *_latencies([], {(): found})]


def _latencies(of: Sequence[str], groups: Mapping[tuple[str, ...], Metrics]) -> list[str]:
    """A line each, by what they are of; `of` heads these columns."""
    rows = [[*names, label, *_latency(getattr(found, field))] for names, found in groups.items() for field, label in LATENCIES.items()]
    heads = [*of, "latency", "mean", "p50", "p95", "p99", "values"]
    marked = any(row[heads.index("p99")].endswith("*") for row in rows)
    return [*table(heads, rows), *(["", FEW_VALUES] if marked else [])]


def _latency(found: Distribution) -> list[str]:
    count = len(found) + found.missing
    figures = [time(value, digits=1) for value in (found.mean, found.percentile(50), found.percentile(95))]
    return [*figures, p99(found.percentile(99), count=count, digits=1), f"{count}"]


def _groups(name: str, groups: dict[str, Metrics]) -> list[str]:
    """Rates, then all latencies."""
    rows = [[group, f"{found.requests}", f"{found.succeeded}", f"{found.output_throughput:.1f}"] for group, found in groups.items()]
    rates = table([name, "requests", "answered", "output tok/s"], rows)
    return [*rates, "", *_latencies([name], {(group,): found for group, found in groups.items()})]


def _failures(records: Sequence[RequestRecord]) -> list[str]:
    """They are in every figure above; here is what became of them."""
    failed = [record for record in records if not record.succeeded]
    if not failed:
        return []
    listed = [[f"{one.index}", one.class_name, one.finish_reason or "unanswered", one.error or "-"] for one in failed[:LISTED]]
    more = [f"And {len(failed) - LISTED} more.", ""] if len(failed) > LISTED else []
    said = f"{len(failed)} of {len(records)} requests have no whole answer. Each counts as infinitely late in the percentiles above."
    return ["## Failed requests", "", said, "", *table(["request", "class", "end", "error"], listed), "", *more]


def _pool(report: Report, run: Run, *, plots: bool) -> None:
    account = run.accounted
    if account is None:
        report.lines += ["## KV pool", "", "The step log contradicts itself, so that it has no account: see the self-check above.", ""]
        report.lines += [_load(run), ""]
        return
    shares = kv_shares(asdict(account.shares))
    heads = [*shares, "shared", "copies", "evictions", "recomputed", "prefix hits", "prefix hits spare"]
    prefix = account.prefix
    row = [
        *(f"{value:.1f} %" for value in shares.values()),
        f"{100 * account.share_saved:.1f} %",
        f"{account.copies}",
        f"{prefix.evictions}",
        f"{account.num_recomputed}",
        f"{100 * prefix.hit_rate:.1f} %",
        time(prefix.seconds),
    ]
    report.lines += [
        "## KV pool",
        "",
        f"{account.capacity} slots; shares are means over time and sum to 100 %.",
        "",
        *table(heads, [row]),
        "",
    ]
    parts: dict[str, float] = {}
    for line in run.steps:
        for name, spent in line.seconds.items():
            parts[name] = parts.get(name, 0.0) + spent
    whole = sum(parts.values())
    if plots:
        report.lines += report.figure("kv-shares", share_bars({"pool": shares}, KV_FILLS, unit="KV pool over time"), "The pool on average.")
        svg, width = kv_over_time({"run": run})
        report.lines += report.figure("kv-over-time", svg, f"The pool over time{resolution(width)}.")
        svg, width = queue_and_batch({"run": run})
        report.lines += ["## Load", "", *report.figure("queue-and-batch", svg, f"Queue and batch over time{resolution(width)}.")]
        if whole > 0:
            percent = {name: 100 * spent / whole for name, spent in parts.items()}
            report.lines += report.figure("step-parts", share_bars({"steps": percent}, PART_FILLS, unit="step time"), "Step time by part.")
    rows = [[name, f"{spent:.3f} s", f"{100 * spent / whole:.1f} %"] for name, spent in parts.items()] if whole > 0 else []
    report.lines += [_load(run), "", *table(["part", "time", "share"], rows), ""]


def _load(run: Run) -> str:
    """In a sentence."""
    rows = sum(line.num_rows for line in run.steps) / len(run.steps)
    most, waited = max(line.num_running for line in run.steps), max(line.num_waiting for line in run.steps)
    return f"{len(run.steps)} steps of {rows:.1f} rows on average; at most {most} requests ran at once, and at most {waited} waited."


def resolution(width: float) -> str:
    """What a point of a line stands for, where it is not a step."""
    return f"; each point is the mean of {width:.2g} s" if width else ""


def identity_rows(identity: Identity | None, run: Run) -> list[list[str]]:
    """What it was measured with, in words."""
    rows = [["load", ", ".join(f"{name} {value}" for name, value in run.settings.items() if value not in (None, "")) or "-"]]
    rows.append(["workload", f"{run.work.name}, seed {run.work.seed}, sha256 {run.work.digest[:12]}"])
    if run.server is not None:
        rows += server_rows(run.server)
    if identity is None:
        return rows
    one = identity
    return [
        ["date", one.date],
        ["model", f"{one.model}, revision {one.model_revision[:19]}, {one.dtype}, KV in {one.kv_dtype}"],
        ["stack", " + ".join(one.stack.values())],
        ["context and pool", f"max_model_len {one.max_model_len}, {one.pool_slots} slots, {one.pool_bytes / GIB:.3f} GiB"],
        *rows,
        ["device", f"{one.device}{f', driver {one.driver}' if one.driver else ''}"],
        ["machine", f"{one.cpu}, {one.cores} cores, {one.threads} threads for torch, {one.memory / GIB:.0f} GiB"],
        ["versions", ", ".join(f"{name} {version}" for name, version in one.versions.items() if version)],
        ["config", f"sha256 {one.config_hash[:12]}"],
    ]


def server_rows(server: ServerIdentity) -> list[list[str]]:
    """What a server says of itself, and why it does not say the rest."""
    known = {
        "server": f"{server.url}{server.endpoint}, model {server.model}",
        "software": server.software,
        "version": server.version,
        "root": server.root,
        "max_model_len": f"{server.max_model_len or ''}",
    }
    rows = [[name, value or f"not known: {server.unknown.get(name, 'the run does not say')}"] for name, value in known.items()]
    if "engine" in server.unknown:
        rows.append(["engine", f"not known: {server.unknown['engine']}"])
    return rows

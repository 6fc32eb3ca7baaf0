"""An ablation as Markdown: tokens first, then figures and ratios of the cells whose tokens are what they must be.

Must not know: engines, files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from octavo.bench.ablation.breakdown import Breakdown
from octavo.bench.ablation.claims import headline, judge
from octavo.bench.ablation.result import AblationResult, CellInfo, Comparison
from octavo.bench.ablation.spec import AGAIN
from octavo.bench.ablation.summary import CellSummary, Speed, summarise
from octavo.bench.runs import Run
from octavo.bench.stability import NAMES, in_words

UNKNOWN = "-"
GIB = 1 << 30


def markdown(result: AblationResult, *, notes: Sequence[str] = (), figures: Mapping[str, Sequence[str]] | None = None) -> str:
    """All of it: per scenario what was run, the tokens, figures, ratios; then claims, and what broke.

    `notes` are lines to stand before everything, `figures` lines to stand after a scenario's tables, by scenario.
    """
    spec = result.spec
    lines = [f"# Ablation: {spec.name}", ""]
    lines += [spec.summary, ""] if spec.summary else []
    lines += notes
    lines += _device(result)
    for scenario in result.cells:
        lines += [*_scenario(result, scenario), "", *(figures or {}).get(scenario, ())]
    if spec.claims:
        rows = [[headline(one.claim), one.outcome, one.found] for one in judge(result)]
        lines += ["## What must hold", "", *table(["claim", "outcome", "found"], rows), ""]
    doubts: list[str] = []
    for of_time in (True, False):
        failed = result.failed_checks(of_time=of_time)
        doubts += [f"* {where}: {problem}" for where, problems in failed.items() for problem in problems]
    if doubts:
        lines += ["## Self-checks that failed", "", *doubts, ""]
    if result.broken:
        lines += ["## Runs that broke", "", *(f"* {where}: {reason}" for where, reason in result.broken.items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _scenario(result: AblationResult, scenario: str) -> list[str]:
    given = result.spec.scenarios[scenario]
    load = given.load
    how = f"{load.concurrency} at once" if load.concurrency else f"{load.rate:g} a second" if load.rate else "at their own times"
    sizes = "".join(f", {name} {value}" for name, value in given.workload.sizes.items())
    cells = [cell for cell in result.cells[scenario] if not cell.left_out]
    lines = [f"## {scenario}: {given.workload.count} x {given.workload.kind}{sizes}; {how}", ""]
    lines += [_pool(cells), ""] if cells else []
    lines += ["Tokens, compared before any speed:", "", *_tokens(result, scenario), ""]
    figures = {cell.name: summarise(runs) for cell in cells if (runs := result.of(scenario, cell.name))}
    lines += [*table(FIGURES, [_figures(result, scenario, cell, figures[cell.name]) for cell in cells if cell.name in figures]), ""]
    lines += [*table(RATIOS, [_ratio(one) for one in result.comparisons(scenario)]), ""]
    stable = [[cell.name, *in_words(figures[cell.name].stability).values()] for cell in cells if cell.name in figures]
    lines += [*table(["cell", *NAMES.values()], stable), ""]
    lines += [*table(KV, [_kv(cell, figures[cell.name], result, scenario) for cell in cells if cell.name in figures]), ""]
    lines += [*table(MEMORY, [row for cell in cells if (row := _memory(cell, result.of(scenario, cell.name)))]), ""]
    known = result.breakdowns.get(scenario, {})
    lines += table(PARTS, [_parts(cell, figures[cell.name], known.get(cell.name)) for cell in cells if cell.name in figures])
    lines += _groups(result, scenario, figures)
    return lines


def _pool(cells: Sequence[CellInfo]) -> str:
    engine, first = cells[0].options["engine"], cells[0]
    return (
        f"Every cell has a KV pool of {first.pool_slots} slots ({first.pool_bytes / GIB:.3f} GiB) "
        f"and max_model_len {engine['max_model_len']}. {first.name}: {first.stack}."
    )


def _tokens(result: AblationResult, scenario: str) -> list[str]:
    lines = []
    for cell in result.cells[scenario]:
        outputs = result.outputs.get(scenario, {}).get(cell.name)
        against = "the fp32 reference" if cell.parent is None else cell.parent
        if cell.left_out:
            lines.append(f"* {cell.name}: left out: {' '.join(cell.left_out.split())}")
        elif outputs is None:
            lines.append(f"* {cell.name}: not compared yet")
        else:
            first, *others = outputs.lines
            lines += [f"* {cell.name} against {against}: {first}", *(f"  {line}" for line in others)]
    return lines


SPEEDS = ["tok/s", "req/s", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p50", "ITL p99", "E2E p50"]
FIGURES = ["cell", "change", *SPEEDS, "batch", "most at once", "queue", "hits", "preempted", "failed"]


def _figures(result: AblationResult, scenario: str, cell: CellInfo, found: CellSummary) -> list[str]:
    speeds = [UNKNOWN] * len(SPEEDS)
    if result.holds(scenario, cell.name):
        speeds = _speeds(found.speed)
    return [
        cell.name,
        cell.change or ("noise floor" if cell.name.endswith(AGAIN) else "baseline"),
        *speeds,
        f"{found.mean_batch:.1f}",
        str(found.peak_running),
        f"{found.mean_waiting:.1f}",
        f"{100 * found.hit_rate:.0f} %",
        str(found.preemptions),
        _failed(found),
    ]


def _speeds(speed: Speed) -> list[str]:
    latencies = speed.latencies
    picked = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("itl", "p50"), ("itl", "p99"), ("e2el", "p50")]
    return [
        f"{speed.output_tok_per_s:.1f}",
        f"{speed.req_per_s:.2f}",
        *(_seconds(getattr(latencies[name], figure)) for name, figure in picked),
    ]


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "never" if value > 0 else UNKNOWN
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _failed(found: CellSummary) -> str:
    if not found.failures:
        return "0"
    return f"{sum(found.failures.values())} of {found.speed.requests} ({', '.join(f'{n} {name}' for name, n in found.failures.items())})"


RATIOS = ["cell", "parent", "measure", "ratio [95 %]", "noise floor", "verdict"]


def _ratio(one: Comparison) -> list[str]:
    if one.interval is None:
        return [one.cell, one.parent, one.measure, UNKNOWN, UNKNOWN, one.problem]
    said = "noise floor" if one.cell.endswith(AGAIN) else one.verdict
    return [one.cell, one.parent, one.measure, str(one.interval), UNKNOWN if one.floor is None else str(one.floor), said]


KV = ["cell", "token states", "reserved", "internal", "external", "cached", "free", "shared", "peak memory"]


def _kv(cell: CellInfo, found: CellSummary, result: AblationResult, scenario: str) -> list[str]:
    shares = [f"{found.kv_shares[name.replace(' ', '_')]:.1f} %" if found.kv_shares else UNKNOWN for name in KV[1:7]]
    tables = [run.memory for run in result.of(scenario, cell.name) if run.memory is not None]
    peak = f"{max(table.peak for table in tables) / GIB:.2f} GiB" if tables else UNKNOWN
    return [cell.name, *shares, f"{100 * found.kv_saved:.1f} %", peak]


MEMORY = ["cell", "weights", "KV pool", "activations", "other", "free", "peak", "sharing spares, of the pool", "of the device"]


def _memory(cell: CellInfo, runs: Sequence[Run]) -> list[str]:
    """Of the repeat with the highest peak; nothing where no run knows it."""
    tables = [run.memory for run in runs if run.memory is not None]
    if not tables:
        return []
    worst = max(tables, key=lambda one: one.peak)
    saved = [account.saved_slots for run in runs if (account := run.accounted) is not None]
    saving = worst.saving(sum(saved) / len(saved)) if saved else None
    shares = [f"{saving.of_pool:.1%}", f"{saving.of_device:.2%}"] if saving else [UNKNOWN] * 2
    sizes = (worst.weights, worst.kv_cache, worst.activations, worst.other, worst.free, worst.peak)
    return [cell.name, *(f"{size / GIB:.3f} GiB" for size in sizes), *shares]


TIMED = ["schedule", "inputs", "forward", "sample", "apply"]
PARTS = (
    ["cell", "steps", *TIMED, "of forward: attention", "linear", "rest", "of the roofline: decode", "prompts", "gaps with a prefill"]
)  # fmt: skip


def _parts(cell: CellInfo, found: CellSummary, breakdown: Breakdown | None) -> list[str]:
    shares = [f"{100 * found.step_shares.get(name, 0.0):.1f} %" for name in TIMED]
    forward, reached = [UNKNOWN] * 3, [UNKNOWN] * 2
    if breakdown is not None and breakdown.forward.forward:
        parts = breakdown.forward
        forward = [f"{100 * one / parts.forward:.1f} %" for one in (parts.attention, parts.linear, parts.rest)]
        forward[1] = forward[1] if breakdown.knows_linears else UNKNOWN
        kinds = breakdown.roofline
        reached = [f"{100 * kinds[kind].share:.0f} %" if kind in kinds else UNKNOWN for kind in ("decode", "prompts")]
    return [cell.name, f"{found.steps:.0f}", *shares, *forward, *reached, f"{100 * found.gaps_with_prefill:.1f} %"]


def _device(result: AblationResult) -> list[str]:
    """With what it was measured."""
    identity = next((run.identity for run in result.runs.values() if run.identity is not None), None)
    if identity is None:
        return []
    types = dict.fromkeys(run.identity.dtype for run in result.runs.values() if run.identity is not None)
    versions = ", ".join(f"{name} {version}" for name, version in identity.versions.items() if version)
    where = identity.cpu if identity.device == "cpu" else f"{identity.device} ({identity.driver})"
    return [
        f"{identity.model} ({identity.model_revision}) in {' and '.join(types)} on {where}, {identity.threads} of {identity.cores} cores. "
        f"{versions}. {result.spec.repeats} repeats.",
        "",
    ]


def _groups(result: AblationResult, scenario: str, figures: dict[str, CellSummary]) -> list[str]:
    """By class and by length of the prompt, where there are several."""
    lines: list[str] = []
    for head, groups in (("class", "by_class"), ("prompt tokens", "by_prompt_length")):
        rows = [
            [name, group, *_speeds(speed), str(speed.failed)]
            for name, found in figures.items()
            if len(getattr(found, groups)) > 1 and result.holds(scenario, name)
            for group, speed in getattr(found, groups).items()
        ]
        lines += ["", *table(["cell", head, *SPEEDS, "failed"], rows)] if rows else []
    return lines


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns line up; nothing where there are no rows."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    if len(lines) == 1:
        return []
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    written = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return [written[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *written[1:]]

"""An ablation as Markdown: tokens first, then figures and ratios of the cells whose tokens are what they must be.

Must not know: engines, files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from octavo.bench.ablation.agreement import Outputs
from octavo.bench.ablation.breakdown import Breakdown
from octavo.bench.ablation.claims import headline, judge
from octavo.bench.ablation.identity_table import measured_with
from octavo.bench.ablation.latency_table import failures, latencies
from octavo.bench.ablation.result import AblationResult, CellInfo, Comparison
from octavo.bench.ablation.roofline_table import rooflines
from octavo.bench.ablation.spec import AGAIN
from octavo.bench.ablation.summary import CellSummary, Speed, summarise
from octavo.bench.check_lines import check_lines
from octavo.bench.markdown import GIB, UNKNOWN, p99, table, time
from octavo.bench.memory_table import Saving
from octavo.bench.records import BROKEN
from octavo.bench.runs import Run
from octavo.bench.stability import NAMES, in_words


def markdown(result: AblationResult, *, notes: Sequence[str] = (), figures: Mapping[str, Sequence[str]] | None = None) -> str:
    """All of it: per scenario what was run, the tokens, figures, ratios; then claims, self-checks, what broke, and what it was run with.

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
    if result.runs:
        lines += ["## Self-checks", "", *check_lines(result.checks()).markdown, ""]
    if result.broken:
        lines += ["## Runs that broke", "", *(f"* {where}: {reason}" for where, reason in result.broken.items()), ""]
    if measured := measured_with(result):
        lines += ["## Measured with", "", *measured, ""]
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
    lost = {cell.name: result.lost(scenario, cell.name) for cell in cells}
    figures = {cell.name: summarise(runs, lost=lost[cell.name]) for cell in cells if (runs := result.of(scenario, cell.name))}
    lines += [*_all_figures(result, scenario, cells, figures), ""]
    lines += [*table(RATIOS, [_ratio(one) for one in result.comparisons(scenario)]), ""]
    lines += [*latencies({(name,): found.speed for name, found in figures.items() if result.holds(scenario, name)}), ""]
    if failed := failures({cell.name: [*result.of(scenario, cell.name), *lost[cell.name]] for cell in cells}):
        lines += [*failed, ""]
    stable = [[cell.name, *in_words(figures[cell.name].stability).values()] for cell in cells if cell.name in figures]
    lines += [*table(["cell", *NAMES.values()], stable), ""]
    lines += [*table(KV, [_kv(cell, figures[cell.name], result, scenario) for cell in cells if cell.name in figures]), ""]
    lines += [COUNTED, ""] if figures else []
    spared = {cell.name: _waste_saved(result, scenario, cell, figures) for cell in cells}
    lines += [*table(MEMORY, [row for cell in cells if (row := _memory(cell, result.of(scenario, cell.name), spared[cell.name]))]), ""]
    known = result.breakdowns.get(scenario, {})
    lines += table(PARTS, [_parts(cell, figures[cell.name], known.get(cell.name)) for cell in cells if cell.name in figures])
    if reached := rooflines({cell.name: known[cell.name] for cell in cells if cell.name in known}):
        lines += ["", *reached]
    lines += _groups(result, scenario, figures)
    return lines


def _pool(cells: Sequence[CellInfo]) -> str:
    """What all share; slots by cell where those of one take more bytes than those of another."""
    engine, first = cells[0].options["engine"], cells[0]
    size = f"{first.pool_bytes / GIB:.3f} GiB"
    if len({cell.pool_slots for cell in cells}) > 1:
        pool = f"{size} ({', '.join(f'{cell.name}: {cell.pool_slots} slots' for cell in cells)})"
    else:
        pool = f"{first.pool_slots} slots ({size})"
    return f"Every cell has a KV pool of {pool} and max_model_len {engine['max_model_len']}. {first.name}: {first.stack}."


def _tokens(result: AblationResult, scenario: str) -> list[str]:
    lines = []
    for cell in result.cells[scenario]:
        outputs = result.outputs.get(scenario, {}).get(cell.name)
        against = cell.parent if cell.parent is not None else f"the fp32 reference{_referenced(result, scenario)}"
        if cell.left_out:
            lines.append(f"* {cell.name}: left out: {' '.join(cell.left_out.split())}")
        elif outputs is None:
            lines.append(f"* {cell.name}: not compared yet")
        else:
            first, *others = outputs.lines
            lines += [f"* {cell.name} against {against}: {first}", *(f"  {line}" for line in others)]
    return lines


def _referenced(result: AblationResult, scenario: str) -> str:
    """In which repeats."""
    repeats = result.referenced.get(scenario, [])
    return f" (repeat {', '.join(str(repeat + 1) for repeat in repeats)} of {result.spec.repeats})" if repeats else ""


SPEEDS = ["tok/s", "req/s", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p50", "ITL p99", "E2E p50"]
RATES = ["requests", "failed", "tok/s", "req/s"]  # of a group
LOSSY = ["agreement", "perplexity (parent's)"]
FIGURES = ["batch", "most at once", "queue", "hits", "preempted", "failed"]
SAID = (
    "Agreement: tokens that are the first choice of the fp32 reference (with whole weights, where a cell quantises them otherwise than its "
    "parent). Perplexity: of the parent's answers, by the cell and by its parent."
)


def _all_figures(result: AblationResult, scenario: str, cells: Sequence[CellInfo], figures: Mapping[str, CellSummary]) -> list[str]:
    """A line a cell; how good its tokens are beside how fast they came, where some cell does not compute what its parent computes."""
    outputs = result.outputs.get(scenario, {})
    lossy = LOSSY if any(one.lossy is not None for one in outputs.values()) else []
    rows = []
    for cell in cells:
        kind = cell.change or ("noise floor" if cell.name.endswith(AGAIN) else "baseline")
        quality = _quality(outputs.get(cell.name)) if lossy else []
        if (found := figures.get(cell.name)) is not None:
            speeds = _speeds(found.speed) if result.holds(scenario, cell.name) else [UNKNOWN] * len(SPEEDS)
            rows.append([cell.name, kind, *speeds, *quality, *_figures(found)])
        elif count := sum(len(run.records) for run in result.lost(scenario, cell.name)):
            unknown = [UNKNOWN] * (len(SPEEDS) + len(lossy) + len(FIGURES) - 1)
            rows.append([cell.name, kind, *unknown, _failed({BROKEN: count}, count)])
    return [*table(["cell", "change", *SPEEDS, *lossy, *FIGURES], rows), *(["", SAID] if lossy else [])]


def _quality(outputs: Outputs | None) -> list[str]:
    """Of a lossy cell."""
    lossy = None if outputs is None else outputs.lossy
    if lossy is None or not lossy.rounding.tokens:
        return [UNKNOWN] * len(LOSSY)
    perplexities = "" if math.isnan(lossy.perplexity) else f"{lossy.perplexity:.3f} ({lossy.parent_perplexity:.3f})"
    return [f"{100 * (1 - lossy.rounding.rate):.2f} %", perplexities or UNKNOWN]


def _figures(found: CellSummary) -> list[str]:
    return [
        f"{found.mean_batch:.1f}",
        str(found.peak_running),
        f"{found.mean_waiting:.1f}",
        f"{100 * found.hit_rate:.0f} %",
        str(found.preemptions),
        _failed(found.failures, found.speed.requests),
    ]


def _speeds(speed: Speed) -> list[str]:
    ttft, itl = speed.latencies["ttft"], speed.latencies["itl"]
    return [
        f"{speed.output_tok_per_s:.1f}",
        f"{speed.req_per_s:.2f}",
        time(ttft.p50),
        p99(ttft.p99, count=min(ttft.counts)),
        time(speed.latencies["tpot"].p50),
        time(itl.p50),
        p99(itl.p99, count=min(itl.counts)),
        time(speed.latencies["e2el"].p50),
    ]


def _failed(kinds: Mapping[str, int], requests: int) -> str:
    if not kinds:
        return "0"
    return f"{sum(kinds.values())} of {requests} ({', '.join(f'{n} {name}' for name, n in kinds.items())})"


RATIOS = ["cell", "parent", "measure", "ratio [95 %]", "noise floor", "verdict"]


def _ratio(one: Comparison) -> list[str]:
    if one.interval is None:
        return [one.cell, one.parent, one.measure, UNKNOWN, UNKNOWN, one.problem]
    said = "noise floor" if one.cell.endswith(AGAIN) else one.verdict
    return [one.cell, one.parent, one.measure, str(one.interval), UNKNOWN if one.floor is None else str(one.floor), said]


KV = ["cell", "token states", "reserved", "internal", "external", "cached", "free"]
KV += ["shared", "copies", "evictions", "recomputed", "prefix hits spare", "peak memory"]
COUNTED = "Shares are means over time; copies, evictions, tokens recomputed and the time that prefix hits spare are of all repeats."


def _kv(cell: CellInfo, found: CellSummary, result: AblationResult, scenario: str) -> list[str]:
    shares = [f"{found.kv_shares[name.replace(' ', '_')]:.1f} %" if found.kv_shares else UNKNOWN for name in KV[1:7]]
    tables = [run.memory for run in result.of(scenario, cell.name) if run.memory is not None]
    peak = f"{max(table.peak for table in tables) / GIB:.2f} GiB" if tables else UNKNOWN
    counts = [f"{count}" for count in (found.copies, found.evictions, found.recomputed)]
    return [cell.name, *shares, f"{100 * found.kv_saved:.1f} %", *counts, time(found.prefix_seconds), peak]


MEMORY = ["cell", "weights", "KV pool", "activations", "other", "free", "peak"]
MEMORY += ["sharing spares, of the pool", "of the device", "less waste than its parent, of the pool", "of the device"]


def _waste_saved(result: AblationResult, scenario: str, cell: CellInfo, figures: Mapping[str, CellSummary]) -> float | None:
    """By how much less of its pool was waste than of its parent's, 0 to 1; below 0: it was more. None where they cannot be compared."""
    mine, parents = figures.get(cell.name), figures.get(cell.parent or "")
    if mine is None or parents is None or not (mine.kv_shares and parents.kv_shares and result.holds(scenario, cell.name)):
        return None
    return (_waste(parents.kv_shares) - _waste(mine.kv_shares)) / 100


def _waste(shares: Mapping[str, float]) -> float:
    return shares["internal"] + shares["external"]


def _memory(cell: CellInfo, runs: Sequence[Run], waste_saved: float | None) -> list[str]:
    """Of the repeat with the highest peak; nothing where no run knows it."""
    tables = [run.memory for run in runs if run.memory is not None]
    if not tables:
        return []
    worst = max(tables, key=lambda one: one.peak)
    saved = [account.saved_slots for run in runs if (account := run.accounted) is not None]
    shared = worst.saving(sum(saved) / len(saved)) if saved else None
    unwasted = None if waste_saved is None else worst.saving(waste_saved * worst.num_slots)
    sizes = (worst.weights, worst.kv_cache, worst.activations, worst.other, worst.free, worst.peak)
    return [cell.name, *(f"{size / GIB:.3f} GiB" for size in sizes), *_saving(shared), *_saving(unwasted)]


def _saving(saving: Saving | None) -> list[str]:
    """Of the pool and of the device."""
    return [f"{saving.of_pool:z.1%}", f"{saving.of_device:z.2%}"] if saving else [UNKNOWN] * 2


TIMED = ["schedule", "inputs", "forward", "sample", "apply"]
PARTS = ["cell", "steps", "ms a step", *TIMED, "of forward: attention", "linear", "rest", "gaps with a prefill"]


def _parts(cell: CellInfo, found: CellSummary, breakdown: Breakdown | None) -> list[str]:
    """Shares, and ms of a step on average; those of the forward pass by the shares that a run with timers gave."""
    spent = found.step_seconds
    parts = [_part(found.step_shares.get(name, 0.0), spent.get(name, 0.0)) for name in TIMED]
    forward = [UNKNOWN] * 3
    if breakdown is not None and (whole := breakdown.forward.forward):
        shares = [one / whole for one in (breakdown.forward.attention, breakdown.forward.linear, breakdown.forward.rest)]
        forward = [_part(share, share * spent.get("forward", 0.0)) for share in shares]
        forward[1] = forward[1] if breakdown.knows_linears else UNKNOWN
    whole_step = f"{1000 * sum(spent.values()):.2f}"
    return [cell.name, f"{found.steps:.0f}", whole_step, *parts, *forward, f"{100 * found.gaps_with_prefill:.1f} %"]


def _part(share: float, seconds: float) -> str:
    return f"{100 * share:.1f} % ({1000 * seconds:.2f} ms)"


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
    """By class and by length of the prompt, where there are several: rates, then all latencies."""
    lines: list[str] = []
    for head, groups in (("class", "by_class"), ("prompt tokens", "by_prompt_length")):
        speeds: dict[tuple[str, ...], Speed] = {
            (name, group): speed
            for name, found in figures.items()
            if len(getattr(found, groups)) > 1 and result.holds(scenario, name)
            for group, speed in getattr(found, groups).items()
        }
        rates = [
            [*names, f"{one.requests}", f"{one.failed}", f"{one.output_tok_per_s:.1f}", f"{one.req_per_s:.2f}"]
            for names, one in speeds.items()
        ]
        lines += ["", *table(["cell", head, *RATES], rates), "", *latencies(speeds, of=("cell", head))] if speeds else []
    return lines

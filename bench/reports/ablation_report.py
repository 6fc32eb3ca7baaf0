"""The report of an ablation: its tables as `octavo ablate` prints them, checks that failed before them, and plots beside them.

Must not know: engines, files.
"""

from __future__ import annotations

from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.spec import AGAIN
from octavo.bench.ablation.summary import summarise
from octavo.bench.ablation.table import markdown
from octavo.bench.reports.doubts import CONTRADICTION, TOO_BUSY, warning
from octavo.bench.reports.drawing import KV_FILLS, PART_FILLS
from octavo.bench.reports.load_plots import latency_curves, queue_and_batch
from octavo.bench.reports.ratio_plots import ratios
from octavo.bench.reports.report import Report
from octavo.bench.reports.run_report import resolution
from octavo.bench.reports.shares import in_percent, kv_over_time, kv_shares, share_bars


def ablation_report(result: AblationResult, *, plots: bool = True) -> Report:
    """Of a whole ablation. Raises ResultError where plots are wanted and matplotlib is not installed."""
    report = Report()
    notes = _doubts(result)
    if not result.finished:
        notes += ["> **Not finished**: the figures are of what was done; `octavo ablate --resume` goes on.", ""]
    figures = {scenario: _figures(report, result, scenario) for scenario in result.cells} if plots else {}
    report.lines += markdown(result, notes=notes, figures=figures).splitlines()
    return report


def _doubts(result: AblationResult) -> list[str]:
    """Which checks failed, before any figure; at most a few of each kind, since all of them stand at the end."""
    failed = [(where, one) for where, checks in result.checks().items() for one in checks if one.problem]
    lines = []
    for of_time, said in ((False, CONTRADICTION), (True, TOO_BUSY)):
        lines += warning(said, [f"{where}: {one.check}: {one.problem}" for where, one in failed if one.of_time is of_time])
    return lines


def _figures(report: Report, result: AblationResult, scenario: str) -> list[str]:
    """Of the cells that ran; speeds only of those whose tokens are what they must be."""
    cells = [cell.name for cell in result.cells[scenario] if result.of(scenario, cell.name)]
    if not cells:
        return []
    floor = next((name for name in cells if name.endswith(AGAIN)), None)
    shown = [name for name in cells if name != floor]
    lines = []
    comparisons = result.comparisons(scenario)
    if any(one.interval for one in comparisons):
        lines += report.figure(
            f"{scenario} ratios",
            ratios(comparisons),
            "Ratios of each cell to its parent over paired repeats, with intervals that hold the true one in 95 of 100 cases. The grey "
            "band is what the baseline differs from itself, either way; a full point has its interval "
            "outside of it, a hollow one says nothing.",
        )
    held = {name: [*result.of(scenario, name), *result.lost(scenario, name)] for name in cells if result.holds(scenario, name)}
    if held:
        caption = "Cumulative distributions over all repeats. A failed request counts as infinitely late: its line ends below 100 %."
        lines += report.figure(f"{scenario} latencies", latency_curves(held, floor=floor), caption)
    found = {name: summarise(result.of(scenario, name)) for name in shown}
    bars = {name: kv_shares(one.kv_shares) for name, one in found.items() if one.kv_shares}
    if not bars:
        return lines
    caption = "What the KV pool's slots held, on average over time and all repeats; hatched red is held or lost and never of use."
    lines += report.figure(f"{scenario} kv shares", share_bars(bars, KV_FILLS, unit="KV pool over time"), caption)
    once = {name: next(run for run in result.of(scenario, name) if run.accounted is not None) for name in bars}
    svg, width = kv_over_time(once)
    lines += report.figure(f"{scenario} kv over time", svg, f"What the KV pool's slots held, in the first repeat{resolution(width)}.")
    svg, width = queue_and_batch(once)
    lines += report.figure(f"{scenario} queue and batch", svg, f"Queue and batch, in the first repeat{resolution(width)}.")
    parts = {name: in_percent(one.step_shares) for name, one in found.items() if one.step_shares}
    if parts:
        caption = "Where the steps' time went, over all repeats."
        lines += report.figure(f"{scenario} step parts", share_bars(parts, PART_FILLS, unit="step time"), caption)
    return lines

"""The plot of an ablation's ratios: a point and its interval for each cell, on the band of what a baseline differs from itself.

Must not know: runs, how a ratio came about, how a plot becomes a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.result import Comparison
from octavo.bench.ablation.spec import AGAIN
from octavo.bench.reports.drawing import GREY, STROKES, as_svg, grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 5, 8, 10, 15, 20, 50, 100)


def ratios(comparisons: Sequence[Comparison]) -> str:
    """A panel a measure, a line a cell. Filled points have a verdict, hollow ones are too noisy or no difference."""
    measures = list(dict.fromkeys(one.measure for one in comparisons))
    cells = list(dict.fromkeys((one.cell, one.parent) for one in comparisons))

    def paint(figure: Figure) -> None:
        panels, _ = grid(figure, len(measures), min(3, len(measures)), sharey=True)
        for axes, measure in zip(panels, measures, strict=True):
            _panel(axes, measure, [one for one in comparisons if one.measure == measure], [cell for cell, _ in cells])
        labels = ["the baseline again" if cell.endswith(AGAIN) else f"{cell}\nagainst {parent}" for cell, parent in cells]
        panels[0].set_yticks(range(len(cells)), labels)
        panels[0].set_ylim(len(cells) - 0.4, -0.6)

    rows = -(-len(measures) // 3)
    return as_svg(paint, height=rows * (0.95 + 0.36 * len(cells)))


def _panel(axes: Axes, measure: str, comparisons: Sequence[Comparison], cells: Sequence[str]) -> None:
    edges = [1.0]
    floor = next((one.floor for one in comparisons if one.floor is not None), None)
    if floor is not None and floor.low > 0 and floor.high < math.inf:
        noise = max(1 / floor.low, floor.low, floor.high, 1 / floor.high)
        axes.axvspan(1 / noise, noise, color="#e6e6e6", linewidth=0)
        edges += [noise, 1 / noise]
    axes.axvline(1, color=GREY, linewidth=0.8)
    for one in comparisons:
        if one.interval is None:
            axes.text(1, cells.index(one.cell), "no ratio", ha="center", va="center", fontsize=8, style="italic")
            continue
        place, ratio = cells.index(one.cell), one.interval.ratio
        again = one.cell.endswith(AGAIN)
        color = GREY if again else STROKES[0].color
        decided = one.verdict in ("faster", "slower") and not again
        edges.append(ratio)
        if one.interval.high < math.inf:
            axes.plot([one.interval.low, one.interval.high], [place, place], color=color, linewidth=1.6, solid_capstyle="butt")
            edges += [one.interval.low, one.interval.high]
        axes.plot([ratio], [place], "o", color=color, markerfacecolor=color if decided else "white", markersize=5)
        axes.annotate(f"{ratio:.2f}", (ratio, place), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8, color="#222222")
    _log_axis(axes, min(edges), max(edges))
    axes.set_title(measure)
    axes.set_xlabel("higher is better →" if find_measure(measure).higher_is_better else "← lower is better", fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _log_axis(axes: Axes, low: float, high: float) -> None:
    """Ratios as far as they go on a logarithmic axis, with few round numbers on it."""
    axes.set_xscale("log")
    low, high = min(low, 0.9), max(high, 1.1)
    room = (high / low) ** 0.09  # for the numbers of the outermost points
    low, high = low / room, high * room
    axes.set_xlim(low, high)
    inside = [tick for tick in TICKS if low <= tick <= high]
    apart = math.log(high / low) / 5  # two numbers, at least
    chosen = [1.0]
    for tick in sorted(inside, key=lambda tick: abs(math.log(tick)), reverse=True):
        if all(abs(math.log(tick / other)) >= apart for other in chosen):
            chosen.append(tick)
    axes.set_xticks(sorted(chosen), [f"{tick:g}×" for tick in sorted(chosen)])
    axes.minorticks_off()

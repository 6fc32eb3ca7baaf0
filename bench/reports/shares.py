"""Plots of shares: where the KV pool's slots or the steps' time were, a bar a cell, and the pool over time.

Must not know: runs' folders, how a plot becomes a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.bench.accounting import SHARES
from octavo.bench.reports.drawing import KV_FILLS, OTHER_FILLS, Fill, as_svg, binned, grid, legend_below
from octavo.bench.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = npt.NDArray[np.float64]
NAMED = 6.0  # percent: a share as large has its number in it


def share_bars(bars: Mapping[str, Mapping[str, float]], fills: Mapping[str, Fill], *, unit: str) -> str:
    """One horizontal bar for each name, of its shares in percent, in the order of `fills`; others come after them."""
    parts = [name for name in fills if any(name in bar for bar in bars.values())]
    parts += sorted({name for bar in bars.values() for name in bar} - set(fills))
    others = iter(OTHER_FILLS * len(parts))
    filled = {name: fills.get(name) or next(others) for name in parts}

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        left = np.zeros(len(bars))
        places = np.arange(len(bars))
        for name, fill in filled.items():
            widths = np.array([bar.get(name, 0.0) for bar in bars.values()])
            axes.barh(
                places, widths, left=left, height=0.66, color=fill.color, hatch=fill.hatch, edgecolor="white", linewidth=0.8, label=name
            )
            for place, width, start in zip(places, widths, left, strict=True):
                if width >= NAMED:
                    _number(axes, start + width / 2, float(place), f"{width:.0f}", fill)
            left += widths
        axes.set_yticks(places, list(bars))
        axes.set_ylim(len(bars) - 0.45, -0.55)
        axes.set_xlim(0, 100)
        axes.set_xlabel(f"{unit} (%)")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        legend_below(figure, *axes.get_legend_handles_labels())

    return as_svg(paint, height=1.0 + 0.32 * len(bars))


def _number(axes: Axes, x: float, y: float, text: str, fill: Fill) -> None:
    """In a box of the area's own colour where it is hatched, so that it can be read."""
    box = {"facecolor": fill.color, "edgecolor": "none", "pad": 0.8} if fill.hatch else None
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if _is_dark(fill.color) else "#222222", bbox=box)


def _is_dark(color: str) -> bool:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 140


def kv_over_time(runs: Mapping[str, Run]) -> tuple[str, float]:
    """A panel for each run: its pool's slots by what they hold, as areas. And the seconds that a point is a mean over (0: a step)."""
    seconds = max(binned(*_times(run), np.zeros(len(run.steps)))[2] for run in runs.values())

    def paint(figure: Figure) -> None:
        columns, longest = 1 if len(runs) == 1 else 2, max(run.steps[-1].end for run in runs.values())
        panels, lowest = grid(figure, len(runs), columns, sharex=True, sharey=True)
        for axes, (name, run) in zip(panels, runs.items(), strict=True):
            account, times = run.account, _times(run)
            areas = []
            for share in SHARES:
                edges, values, _ = binned(*times, account.series[share] * 100.0 / account.capacity)
                areas.append(np.append(values, values[-1]))
            fills = list(KV_FILLS.values())
            stacked = axes.stackplot(
                edges, areas, step="post", colors=[fill.color for fill in fills], labels=list(KV_FILLS), linewidth=0, edgecolor="white"
            )
            for area, fill in zip(stacked, fills, strict=True):
                area.set_hatch(fill.hatch)
            axes.set_ylim(0, 100)
            axes.set_xlim(0, longest)
            if len(runs) > 1:
                axes.set_title(name)
        for axes in panels[::columns]:
            axes.set_ylabel("KV pool (%)")
        for axes in lowest:
            axes.set_xlabel("time (s)")
        legend_below(figure, *panels[0].get_legend_handles_labels())

    rows = -(-len(runs) // 2)
    return as_svg(paint, height=2.9 if len(runs) == 1 else 0.8 + 1.6 * rows), seconds


def _times(run: Run) -> tuple[Numbers, Numbers]:
    return np.array([line.start for line in run.steps]), np.array([line.end for line in run.steps])


def kv_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """With names as they are printed."""
    return {name.replace("_", " "): value for name, value in shares.items()}


def in_percent(shares: Mapping[str, float]) -> dict[str, float]:
    """Of shares between 0 and 1."""
    return {name: 100 * value for name, value in shares.items()}

"""Plots of load and what requests saw of it: queue and batch over time, and how latencies are distributed.

Must not know: runs' folders, how a plot becomes a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.bench.distribution import Distribution
from octavo.bench.metrics import measure
from octavo.bench.reports.drawing import FLOOR_STROKE, STROKES, Stroke, as_svg, binned, grid, legend_below, stroke
from octavo.bench.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCIES = {"ttft": "time to first token", "itl": "inter-token latency", "e2el": "end to end"}
FAR = 100.0  # times, from which on only powers of ten have a number
WIDE = 8.0  # times from the 1st to the 99th percentile: more is drawn on a logarithmic axis


def queue_and_batch(runs: Mapping[str, Run]) -> tuple[str, float]:
    """A panel for each run: requests waiting, and rows in the batch. And the seconds that a point is a mean over (0: a step)."""
    seconds = 0.0

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        nonlocal seconds
        columns, longest = 1 if len(runs) == 1 else 2, max(run.steps[-1].end for run in runs.values())
        highest = max(max(line.num_waiting, line.num_rows, 1) for run in runs.values() for line in run.steps)
        panels, lowest = grid(figure, len(runs), columns, sharex=True, sharey=True)
        for axes, (name, run) in zip(panels, runs.items(), strict=True):
            starts, ends = np.array([line.start for line in run.steps]), np.array([line.end for line in run.steps])
            waiting = np.array([line.num_waiting for line in run.steps], float)
            rows = np.array([line.num_rows for line in run.steps], float)
            for label, values, drawn in (("rows in the batch", rows, STROKES[0]), ("requests waiting", waiting, STROKES[1])):
                edges, heights, width = binned(starts, ends, values)
                seconds = max(seconds, width)
                axes.step(
                    edges,
                    np.append(heights, heights[-1]),
                    where="post",
                    color=drawn.color,
                    linestyle=drawn.dashes,
                    linewidth=1.1,
                    label=label,
                )
            axes.set_ylim(0, 1.08 * highest)
            axes.set_xlim(0, longest)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
            axes.grid(axis="y")
            if len(runs) > 1:
                axes.set_title(name)
        for axes in panels[::columns]:
            axes.set_ylabel("requests")
        for axes in lowest:
            axes.set_xlabel("time (s)")
        legend_below(figure, *panels[0].get_legend_handles_labels(), of_lines=True)

    rows = -(-len(runs) // 2)
    return as_svg(paint, height=2.5 if len(runs) == 1 else 0.75 + 1.4 * rows), seconds


def latency_curves(cells: Mapping[str, Sequence[Run]], *, floor: str | None = None) -> str:
    """Cumulative distributions, a panel a latency, a line a cell, over all its repeats. `floor`: the cell drawn as what noise does.

    A request without the latency counts as infinite, so that a line whose requests failed ends below 100 %.
    """
    records = {name: [record for run in runs for record in run.records] for name, runs in cells.items()}
    found = {name: measure(of_cell) for name, of_cell in records.items()}

    def paint(figure: Figure) -> None:
        panels, _ = grid(figure, len(LATENCIES), len(LATENCIES), sharey=True)
        for axes, (field, title) in zip(panels, LATENCIES.items(), strict=True):
            latencies: dict[str, Distribution] = {name: getattr(metrics, field) for name, metrics in found.items()}
            _curves(axes, latencies, floor)
            axes.set_title(title)
        panels[0].set_ylabel("requests or gaps (%)")
        panels[0].set_ylim(0, 101)
        if len(cells) > 1:
            legend_below(figure, *panels[0].get_legend_handles_labels(), of_lines=True)

    lines = len(cells) if len(cells) > 1 else 0
    return as_svg(paint, height=2.6 + 0.17 * -(-lines // 3))


def _curves(axes: Axes, latencies: Mapping[str, Distribution], floor: str | None) -> None:
    from matplotlib.ticker import LogLocator

    pooled = [value for latency in latencies.values() for value in latency.values]
    low, high = (float(edge) for edge in np.percentile(pooled, (1, 99))) if pooled else (1.0, 1.0)
    scale, unit = (1.0, "s") if high >= 2 else (1000.0, "ms")
    place = 0
    for name, latency in latencies.items():
        drawn: Stroke = FLOOR_STROKE if name == floor else stroke(place)
        place += name != floor
        count = len(latency.values) + latency.missing
        shown = _thinned(np.array(latency.values) * scale)
        heights = 100 * np.array([(position + 1) / count for position, _ in shown])
        across = [value for _, value in (*shown[:1], *shown)]
        axes.step(
            across,
            np.append(np.zeros(len(shown[:1])), heights),
            where="post",
            color=drawn.color,
            linestyle=drawn.dashes,
            linewidth=drawn.width,
            label=name,
        )
    if low > 0 and high / low > WIDE:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < FAR else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(f"time ({unit})")
    axes.grid()


def _thinned(values: npt.NDArray[np.float64], most: int = 600) -> list[tuple[int, float]]:
    """Position and value of at most so many of the sorted values, the first and the last among them."""
    positions = np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(int))
    return [(int(position), float(values[position])) for position in positions]

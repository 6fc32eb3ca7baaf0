"""How plots look, and how they become SVG: one size of type, one palette that can be told apart in grey, nothing fetched from elsewhere.

matplotlib is imported when the first plot is drawn, since only the `bench` extra installs it.
Must not know: what is plotted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from octavo.core.errors import ResultError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches: the text of a printed page
MOST_POINTS = 300  # of a line; longer ones are drawn as means over equal times
GREY = "#8a8a8a"
GRID = "#dcdcdc"

STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "path",  # looks the same wherever it is opened
    "svg.hashsalt": "octavo",  # the same plot is the same file
}


@dataclass(frozen=True, slots=True)
class Fill:
    """Of an area: in grey, its lightness and its hatching tell it from its neighbours."""

    color: str
    hatch: str = ""


KV_FILLS = {
    "token states": Fill("#17456b"),
    "reserved": Fill("#74b3de"),
    "internal": Fill("#c8503c", "////"),
    "external": Fill("#eba06e", "\\\\\\\\"),
    "cached": Fill("#b9d8a0", "---"),
    "free": Fill("#f3f3f3"),
}
PART_FILLS = {
    "schedule": Fill("#7a3b69"),
    "inputs": Fill("#d08bb9", "////"),
    "forward": Fill("#2f6f73"),
    "sample": Fill("#a7cfc8", "---"),
    "apply": Fill("#f0e2a8", "\\\\\\\\"),
}
OTHER_FILLS = (Fill("#9a9a9a", "xx"), Fill("#c9c9c9", "++"), Fill("#5e5e5e", "oo"), Fill("#e3e3e3", "--"))


@dataclass(frozen=True, slots=True)
class Stroke:
    """Of a line: its dashes tell it from others where colours do not."""

    color: str
    dashes: Any = "-"
    width: float = 1.4


STROKES = (
    Stroke("#17456b", "-"),
    Stroke("#c8503c", (0, (5, 1.5))),
    Stroke("#2f8a5b", (0, (1.2, 1.2))),
    Stroke("#c98a1b", (0, (6, 1.5, 1.2, 1.5))),
    Stroke("#7a3b69", (0, (3, 1, 1, 1, 1, 1))),
    Stroke("#3f9fd8", (0, (9, 2))),
    Stroke("#000000", (0, (2, 2.5))),
    Stroke("#a05a2c", (0, (7, 1.5, 2.5, 1.5))),
)
FLOOR_STROKE = Stroke(GREY, "-", 0.9)


def stroke(position: int) -> Stroke:
    """Of the line at that place; after the last one they come again, thinner."""
    turn, place = divmod(position, len(STROKES))
    found = STROKES[place]
    return found if not turn else Stroke(found.color, found.dashes, 0.8)


def as_svg(paint: Callable[[Figure], None], *, height: float, width: float = WIDTH) -> str:
    """What `paint` draws, as an SVG document. Sizes in inches. Raises ResultError where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ResultError("plots need matplotlib: pip install octavo[bench], or leave them out with --no-plots") from error
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]  # its names are literals there
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": "Octavo"})
    return re.sub(r' d="[^"]*"', _rounded, written.getvalue())


def _rounded(path: re.Match[str]) -> str:
    """Coordinates to a hundredth of a point, for files of half the size."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[0])


def grid(figure: Figure, count: int, columns: int, **options: Any) -> tuple[list[Axes], list[Axes]]:
    """`count` panels in rows of `columns`, and those of them that have no other below: they carry the labels of the shared axis."""
    rows = -(-count // columns)
    table = figure.subplots(rows, columns, squeeze=False, **options)
    panels = [table[position // columns][position % columns] for position in range(rows * columns)]
    for empty in panels[count:]:
        empty.remove()
    lowest = panels[max(0, count - columns) : count]
    for axes in lowest:
        axes.tick_params(labelbottom=True)
    return panels[:count], lowest


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str], *, of_lines: bool = False) -> None:
    """Below all panels, where it hides nothing. Handles of lines are long enough to show their dashes."""
    widest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), 120 // (widest + (9 if of_lines else 6))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.4 if of_lines else 2.0)


def binned(
    starts: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], values: npt.NDArray[np.float64], *, most: int = MOST_POINTS
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Edges [N + 1], values [N] between them, and how many seconds each is a mean over; 0 where they are the steps' own.

    `values[i]` held from `starts[i]` to `ends[i]`; between two of them the earlier one goes on.
    """
    edges = np.append(starts, ends[-1])
    if len(values) <= most:
        return edges, values, 0.0
    area = np.concatenate([[0.0], np.cumsum(values * np.diff(edges))])
    even = np.linspace(edges[0], edges[-1], most + 1)
    width = float(even[1] - even[0])
    return even, np.diff(np.interp(even, edges, area)) / width if width > 0 else values[:most], width

"""What plots are made of: fills and lines that can be told apart in grey, long lines as means, SVG that is the same each time."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

from octavo.bench.reports.drawing import KV_FILLS, PART_FILLS, STROKES, as_svg, binned, grid, legend_below
from octavo.core.errors import ResultError


def lightness(color: str) -> float:
    """Of `#rrggbb`, 0 to 255, as a grey printer sees it."""
    return float(np.dot([int(color[at : at + 2], 16) for at in (1, 3, 5)], [0.299, 0.587, 0.114]))


@pytest.mark.parametrize("fills", [KV_FILLS, PART_FILLS])
def test_neighbours_differ_in_grey(fills: dict[str, object]) -> None:
    """By hatching, or by a fifth of the way from black to white."""
    for one, other in pairwise(KV_FILLS.values() if fills is KV_FILLS else PART_FILLS.values()):
        assert one.hatch != other.hatch or abs(lightness(one.color) - lightness(other.color)) > 50


def test_lines_differ_in_grey() -> None:
    """No two have the same dashes."""
    assert len({str(one.dashes) for one in STROKES}) == len(STROKES)


def test_a_short_line_is_drawn_as_it_is() -> None:
    """Edges of the steps, and their values."""
    edges, values, width = binned(np.array([0.0, 1.0, 3.0]), np.array([1.0, 2.0, 4.0]), np.array([5.0, 6.0, 7.0]))
    assert edges.tolist() == [0, 1, 3, 4] and values.tolist() == [5, 6, 7] and width == 0


def test_a_long_line_keeps_its_mean() -> None:
    """As means over equal times: the area is that of the steps, however long each took."""
    lengths = np.random.default_rng(0).uniform(0.1, 3.0, 1000)
    ends = np.cumsum(lengths)
    values = np.random.default_rng(1).integers(0, 9, 1000).astype(float)
    edges, means, width = binned(ends - lengths, ends, values, most=100)
    assert len(means) == 100 and width == pytest.approx(ends[-1] / 100)
    assert means @ np.diff(edges) == pytest.approx(values @ lengths)
    assert means.min() >= values.min() and means.max() <= values.max()


def test_the_svg() -> None:
    """Well-formed, without a font from elsewhere, and the same for the same plot; a dollar sign is a dollar sign."""

    def paint(figure) -> None:  # type: ignore[no-untyped-def]
        panels, _ = grid(figure, 3, 2)
        for axes in panels:
            axes.plot([0, 1], [1, 2.123456], label="costs $1 and $2")
        legend_below(figure, *panels[0].get_legend_handles_labels(), of_lines=True)

    one = as_svg(paint, height=2)
    assert one == as_svg(paint, height=2)
    root = ET.fromstring(one)
    assert root.tag.endswith("svg") and not [node for node in root.iter() if node.tag.endswith(("}text", "}image", "}script"))]
    assert "font-family" not in one and "@import" not in one


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ResultError, match=r"pip install octavo\[bench\], or leave them out with --no-plots"):
        as_svg(lambda figure: None, height=1)

"""The pictures in docs/explanation/schedulers.md are what the schedulers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.descriptors import PoolShape, SchedulerPlugin
from octavo.core.testing.rig import Rig
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.schedulers.chunked import CHUNKED
from octavo.plugins.schedulers.continuous import CONTINUOUS
from octavo.plugins.schedulers.static import STATIC

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "schedulers.md"
MAX_MODEL_LEN = 40


def picture(plugin: SchedulerPlugin, options: dict[str, Any]) -> str:
    """A line a request, a column a step: how many of its tokens run."""
    kv = PAGED.build(PagedOptions(), PoolShape(num_slots=512, num_host_slots=0, max_model_len=MAX_MODEL_LEN, max_num_seqs=3))
    options = {"max_num_seqs": 3, "max_num_batched_tokens": MAX_MODEL_LEN} | options
    rig = Rig(plugin.build(plugin.options(**options), kv), kv, max_model_len=MAX_MODEL_LEN)
    requests = {"A": rig.add(4, 9), "B": rig.add(4, 3)}
    rig.step(2)
    requests["C"] = rig.add(20, 4)
    rig.finish()
    lines = []
    for name, request in requests.items():
        cells = (next((chunk.length for chunk in plan.chunks if chunk.sequence.request is request), ".") for plan in rig.plans)
        lines.append(name + " " + "".join(f"{cell:>3}" for cell in cells))
    return "\n".join(lines)


PICTURES: list[tuple[SchedulerPlugin, dict[str, Any]]] = [
    (STATIC, {}),
    (CONTINUOUS, {}),
    (CONTINUOUS, {"mixing": "prefill_first"}),
    (CHUNKED, {"max_num_batched_tokens": 8}),
    (CHUNKED, {"max_num_batched_tokens": 8, "mixing": "prefill_first"}),
]


@pytest.mark.parametrize(("plugin", "options"), PICTURES)
def test_each_picture_is_what_happens(plugin: SchedulerPlugin, options: dict[str, Any]) -> None:
    """Drawn by an engine, and found in the page under that scheduler."""
    section = PAGE.read_text(encoding="utf-8").split(f"## `{plugin.name}`")[1].split("\n## ")[0]
    assert f"```\n{picture(plugin, options)}\n```" in section


def test_the_page_has_no_other_picture() -> None:
    """All are checked above."""
    assert PAGE.read_text(encoding="utf-8").count("\n```\nA ") == len(PICTURES)

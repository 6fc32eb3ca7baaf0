"""What an ablation's table says of groups and types, and how the run that splits steps into parts is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.ablation import breakdown
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.running import run_ablation
from octavo.bench.ablation.table import markdown
from octavo.bench.work import Work
from octavo.core.engine import Engine
from tests.bench.ablation.made import made_run, record, twice_as_fast
from tests.bench.ablation.small import registry, small_spec
from tests.bench.test_compare import IDENTITY


def test_groups_by_prompt_length() -> None:
    """Short and long prompts have rates and all latencies each, where there are both."""
    result = twice_as_fast()
    assert "prompt tokens" not in markdown(result)
    for key in result.runs:
        result.runs[key] = made_run(4.0, records=[record(0, 1.0, 2.0, 4.0), record(1, 1.0, 2.0, 4.0, num_prompt_tokens=5)])
    text = markdown(result)
    assert "| prompt tokens " in text and "| base         | 1-16" in text and "| base         | 65-128" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    rates = {(row[0], row[1]): row[2:] for row in rows if row[1] in ("1-16", "65-128") and len(row) == 6}
    assert rates["fast", "1-16"] == rates["base", "65-128"] == ["3", "0", "0.8", "0.25"]
    latencies = {(row[0], row[1], row[2]): row[3:] for row in rows if row[1] in ("1-16", "65-128") and len(row) == 8}
    assert {one[2] for one in latencies if one[:2] == ("fast", "1-16")} == {"queue", "TTFT", "TPOT", "ITL", "E2E"}
    assert latencies["fast", "1-16", "TTFT"] == ["1.00 s", "1.00 s", "1.00 s", "1.00 s *", "1"] and len(latencies) == 3 * 2 * 5


def test_all_types_are_named() -> None:
    """Where cells differ in theirs, that of the first is not said of all."""
    result = twice_as_fast()
    for (_, cell, _), run in result.runs.items():
        run.identity = replace(IDENTITY, dtype="bfloat16" if cell == "fast" else "float32")
    assert "(abc) in float32 and bfloat16 on EPYC" in markdown(result)


def test_the_run_for_parts_is_made_as_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up like them, and ended by the scenario's own time-out."""
    seen: list[dict[str, Any]] = []
    drive = breakdown.drive

    def watched(engine: Engine, work: Work, *, progress: Any, **how: Any) -> Any:
        seen.append(how)
        return drive(engine, work, progress=progress, **how)

    monkeypatch.setattr(breakdown, "drive", watched)
    warmed: list[object] = []
    monkeypatch.setattr("octavo.bench.ablation.running._Ablation._warm_up", lambda self, built, scenario: warmed.append(built))
    spec = small_spec(repeats=1)
    load = {"concurrency": 4, "timeout_s": 50.0}
    spec = small_spec(repeats=1, scenarios={"lengths": spec.scenarios["lengths"].model_dump() | {"load": load}})
    result = run_ablation(Engines(registry()), spec, tmp_path, told=lambda *told: None)
    assert not result.broken and seen == [load] * 3
    assert len(warmed) == len(result.runs) + 3

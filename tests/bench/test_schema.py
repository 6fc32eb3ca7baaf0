"""Versions of what is saved; of runs see test_runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.ablation import result as ablations
from octavo.bench.ablation.result import AblationResult
from octavo.bench.compare import compare
from octavo.bench.figures import MEASURES, of_ablation, read_figures
from octavo.bench.schema import migrated
from octavo.core.errors import ResultError
from tests.bench.ablation.made import twice_as_fast


def test_an_ablation_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes through the migration; without one, what to do is said."""
    twice_as_fast().save(tmp_path)
    monkeypatch.setattr(ablations, "SCHEMA_VERSION", 3)
    with pytest.raises(ResultError, match="schema version 2, which this Octavo cannot read any more"):
        AblationResult.load(tmp_path)
    monkeypatch.setitem(ablations.MIGRATIONS, 2, lambda content: content | {"broken": {"s/fast/1": "migrated"}})
    assert AblationResult.load(tmp_path).broken == {"s/fast/1": "migrated"}


FIXTURES = Path(__file__).parent / "fixtures"


def test_an_ablation_of_version_1(tmp_path: Path) -> None:
    """The folder was written by the first version and is never written again: ratios, tokens and runs go on being understood."""
    result = AblationResult.load(FIXTURES / "ablation_v1")
    assert result.finished and result.tokens_hold and result.broken == {}
    assert set(result.runs) == {("lengths", name, repeat) for name in ("continuous", "paged", "continuous (again)") for repeat in range(2)}
    assert all(len(run.records) == 3 and run.account.shares.total == pytest.approx(100) for run in result.runs.values())
    assert result.failed_checks(of_time=False) == {} and set(result.breakdowns["lengths"]) == {"continuous", "paged"}
    assert result.compared == {"lengths": [0, 1]}
    ratios = {one.cell: one.interval.ratio for one in result.comparisons("lengths") if one.interval is not None}
    assert ratios == pytest.approx(json.loads((FIXTURES / "ablation_v1.json").read_text()))
    result.save(tmp_path)
    assert json.loads((tmp_path / "ablation.json").read_text())["schema_version"] == ablations.SCHEMA_VERSION
    assert of_ablation(result).cells.keys() == read_figures(FIXTURES / "figures_v1.json").cells.keys()


@pytest.mark.parametrize(
    ("finished", "said", "compared"), [(True, {}, [0, 1]), (False, {}, []), (False, {"compared": {"lengths": [1]}}, [1])]
)
def test_which_repeats_an_old_ablation_compared(finished: bool, said: dict[str, Any], compared: list[int], tmp_path: Path) -> None:
    """What it says; else all if it came to its end. Of another one nothing is known, and there is no ratio until it is resumed."""
    content = json.loads((FIXTURES / "ablation_v1" / "ablation.json").read_text())
    content.pop("compared", None)
    shutil.copytree(FIXTURES / "ablation_v1", tmp_path / "result")
    (tmp_path / "result" / "ablation.json").write_text(json.dumps(content | said | {"finished": finished}))
    result = AblationResult.load(tmp_path / "result")
    assert result.compared == {"lengths": compared}
    assert {one.interval is None for one in result.comparisons("lengths")} == {not compared}


def test_kept_figures_of_version_1() -> None:
    """The file was written by the first version and is never written again."""
    found = read_figures(FIXTURES / "figures_v1.json")
    assert set(found.cells) == {"lengths/continuous", "lengths/paged", "lengths/continuous (again)"} and not found.problems
    for cell in found.cells.values():
        assert len(cell.workloads) == 2 and cell.failed == [0, 0] and cell.tokens_hold and set(cell.values) == set(MEASURES)
    assert not compare(found, read_figures(FIXTURES / "ablation_v1")).regressed


@pytest.mark.parametrize("content", [{}, {"schema_version": "1"}])
def test_what_has_no_version(content: dict[str, Any]) -> None:
    """Is not ours."""
    with pytest.raises(ResultError, match="has no schema_version"):
        migrated(content, {}, where=Path("x"), to=1, header=lambda content: content)

"""Versions of what is saved; of runs and kept figures see test_runs and test_compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.bench.ablation import result as ablations
from octavo.bench.ablation.result import AblationResult
from octavo.bench.schema import migrated
from octavo.core.errors import ResultError
from tests.bench.ablation.made import twice_as_fast


def test_an_ablation_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes through the migration; without one, what to do is said."""
    twice_as_fast().save(tmp_path)
    monkeypatch.setattr(ablations, "SCHEMA_VERSION", 2)
    with pytest.raises(ResultError, match="schema version 1, which this Octavo cannot read any more"):
        AblationResult.load(tmp_path)
    monkeypatch.setitem(ablations.MIGRATIONS, 1, lambda content: content | {"broken": {"s/fast/1": "migrated"}})
    assert AblationResult.load(tmp_path).broken == {"s/fast/1": "migrated"}


@pytest.mark.parametrize("content", [{}, {"schema_version": "1"}])
def test_what_has_no_version(content: dict[str, Any]) -> None:
    """Is not ours."""
    with pytest.raises(ResultError, match="has no schema_version"):
        migrated(content, {}, where=Path("x"), to=1, header=lambda content: content)

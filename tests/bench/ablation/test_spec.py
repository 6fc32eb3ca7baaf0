"""Specifications of ablations: what can be written, and errors that name the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.ablation.spec import AblationSpec, load_spec, read_spec
from octavo.bench.ablation.works import scenario_work
from octavo.core.errors import InvalidOptionsError

FILE = """
summary = "does paging help"
repeats = 3
[settings]
engine = { max_model_len = 128, num_kv_slots = 256 }
[scenarios.short]
workload = { kind = "random", count = 4, input_len = 8 }
load = { concurrency = 2 }
[cells.paged]
parent = "orca"
settings = { allocator = { plugin = "paged" } }
[cells.orca]
preset = "orca"
"""


def minimal(**changes: Any) -> dict[str, Any]:
    base = {"name": "x", "scenarios": {"a": {"workload": {"kind": "random"}}}, "cells": {"one": {}}}
    return base | changes


def test_a_file(tmp_path: Path) -> None:
    """Sizes of the workload are kept as written, the file's name is the ablation's, parents come first."""
    path = tmp_path / "paging.toml"
    path.write_text(FILE)
    spec = load_spec(path)
    assert (spec.name, spec.repeats, spec.baselines) == ("paging", 3, ["orca"])
    assert [name for name, _ in spec.ordered()] == ["orca", "paged"]
    workload = spec.scenarios["short"].workload
    assert (workload.kind, workload.count, workload.sizes) == ("random", 4, {"input_len": 8})
    assert AblationSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"repeat": 3}, "repeat: Extra inputs are not permitted (did you mean repeats?)"),
        ({"cells": {"one": {"setings": {}}}}, "cells.one.setings: Extra inputs are not permitted (did you mean settings?)"),
        (
            {"scenarios": {"a": {"workload": {"kind": "x"}, "laod": {}}}},
            "scenarios.a.laod: Extra inputs are not permitted (did you mean load?)",
        ),
        (
            {"scenarios": {"a": {"workload": {"kind": "x"}, "load": {"rte": 1}}}},
            "scenarios.a.load.rte: Extra inputs are not permitted (did you mean rate?)",
        ),
        (
            {"scenarios": {"a": {"workload": {"kind": "x"}, "load": {"rate": 1, "concurrency": 2}}}},
            "scenarios.a.load: concurrency is a closed loop and rate an open one; set one of them",
        ),
        ({"scenarios": {"a": {"workload": {"kind": "x"}, "load": {"burstiness": 2}}}}, "scenarios.a.load: burstiness shapes the gaps"),
        (
            {"scenarios": {"a": {"workload": {"kind": "x"}, "load": {"rate": 1, "burstiness": "even"}}}},
            "scenarios.a.load.burstiness: Input should be a valid number",
        ),
        (
            {"scenarios": {"a": {"workload": {"kind": "x"}, "load": {"rate": 1, "burstiness": "nan"}}}},
            "scenarios.a.load.burstiness: Input should be greater than 0",
        ),
        ({"scenarios": {"a": {"workload": {"kind": "x"}, "load": {"rate": math.inf}}}}, "scenarios.a.load.rate: Input should be a finite"),
        ({"scenarios": {"a": {"workload": {}}}}, "scenarios.a.workload.kind: Field required"),
        ({"scenarios": {}}, "scenarios: Dictionary should have at least 1 item"),
        ({"repeats": 0}, "repeats: Input should be greater than or equal to 1 (got 0)"),
        ({"cells": {"one": {"parent": "ome"}}}, "cells.one.parent: no cell is called 'ome' (did you mean one?)"),
        ({"cells": {"a": {"parent": "b"}, "b": {"parent": "a"}}}, "cells.a.parent: 'a' is its own ancestor"),
        ({"cells": {"a": {}, "b": {"parent": "a", "preset": "orca"}}}, "cells.b: a cell starts from its parent or from a preset"),
        ({"cells": {"../x": {}}}, "cells: '../x' is no name"),
        ({"cells": {"x (again)": {}}}, "cells: 'x (again)': names that end in ' (again)' are for the noise floor"),
        ({"claims": [{"scenario": "a", "cell": "two", "measure": "req/s", "at_least": 1}]}, "claims.0.cell: there is none called 'two'"),
        ({"claims": [{"scenario": "a", "cell": "one", "measure": "req/s"}]}, "claims.0: set at_least, at_most or both"),
        ({"name": "a/b"}, "name: String should match pattern"),
    ],
)
def test_mistakes(changes: dict[str, Any], expected: str) -> None:
    """Each is told with its key and where it was written."""
    with pytest.raises(InvalidOptionsError) as caught:
        read_spec(minimal(**changes), origin="x.toml")
    assert str(caught.value).startswith("ablation x.toml: ") and expected in str(caught.value)


@pytest.mark.parametrize("written", ["inf", '"inf"'])
def test_even_gaps(written: str, tmp_path: Path) -> None:
    """A burstiness of infinity, as TOML's number or as a word; JSON, which has no such number, says the word, and gaps are constant."""
    path = tmp_path / "even.toml"
    path.write_text(FILE.replace("load = { concurrency = 2 }", f"load = {{ rate = 4.0, burstiness = {written} }}"))
    spec = load_spec(path)
    load = spec.scenarios["short"].load
    assert load.burstiness == math.inf and load.model_dump(mode="json")["burstiness"] == "inf"
    json.loads(spec.model_dump_json(), parse_constant=lambda name: pytest.fail(name))
    assert AblationSpec.model_validate_json(spec.model_dump_json()) == spec
    work = scenario_work(spec.scenarios["short"], "short", seed=0, vocab_size=100, max_model_len=2048)
    assert [item.at for item in work.items] == [0.0, 0.25, 0.5, 0.75]


def test_files_that_are_none(tmp_path: Path) -> None:
    """Missing, and no TOML."""
    with pytest.raises(InvalidOptionsError, match=r"ablation file .*none\.toml cannot be read: No such file"):
        load_spec(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("cells = ")
    with pytest.raises(InvalidOptionsError, match=r"bad\.toml is not valid TOML"):
        load_spec(tmp_path / "bad.toml")

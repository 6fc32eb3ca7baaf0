"""Break one promise at a time: some test must notice. `MUTANTS` is the table of what is broken and who notices.

A mutant replaces a piece of a function's source. `noticed_by` names a test of this folder (or of `tests/plugins/schedulers`) that
passes on the real code and must fail on the broken one, or `random runs`: the random driver with the given fields of its case.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from octavo.core.testing.random_runs import draw_case, run
from tests.core.mutants import CORE, RANDOM, Mutant
from tests.core.policy_mutants import POLICIES

MUTANTS = CORE | POLICIES
MOST_RUNS = 150
HERE = Path(__file__).parent


def mutate(function: Any, edits: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the function (or property) the code of its edited source, wherever it was imported to."""
    function = function.fget if isinstance(function, property) else function
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    for there, instead in edits:
        assert source.count(there) == 1, f"{function.__qualname__} no longer holds once: {there}"
        source = source.replace(there, instead)
    module = compile("from __future__ import annotations\n" + source, f"<mutant of {function.__qualname__}>", "exec")
    (code,) = (c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)
    monkeypatch.setattr(function, "__code__", code)


def notices(mutant: Mutant, *, fixtures: dict[str, Any]) -> bool:
    """Whether the test that is named fails, or one of the first random runs does."""
    if mutant.noticed_by == RANDOM:
        stacks = fixtures["stacks"]
        cases = (draw_case(number, schedulers=stacks.schedulers, allocators=stacks.allocators) for number in itertools.count())
        matching = (replace(case, **mutant.arguments) for case in itertools.islice(cases, MOST_RUNS))
        return any(fails(lambda case=case: run(case, stacks.make)) for case in matching)
    file, name = mutant.noticed_by.split("::")
    test = getattr(load(file), name)
    wanted = inspect.signature(test).parameters
    arguments = {key: value for key, value in fixtures.items() if key in wanted} | mutant.arguments
    if "policy" in wanted:
        arguments["policy"] = fixtures["stacks"].policies[arguments["policy"]]
    return fails(lambda: test(**arguments))


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except (Exception, pytest.fail.Exception):
        return True
    return False


def load(file: str) -> ModuleType:
    """A test module by its path."""
    name = f"noticing_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, (HERE.parent if "/" in file else HERE) / file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(
    name: str, stacks: Any, new_rig: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test in the table fails once the promise is broken."""
    mutant = MUTANTS[name]
    mutate(mutant.function, mutant.edits, monkeypatch)
    assert notices(mutant, fixtures={"stacks": stacks, "new_rig": new_rig, "caplog": caplog, "monkeypatch": monkeypatch})


@pytest.mark.parametrize("noticed_by", sorted({m.noticed_by for m in MUTANTS.values()} - {RANDOM}))
def test_who_notices_passes_on_the_real_code(
    noticed_by: str, stacks: Any, new_rig: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Called in the way of this file: a test that always fails would notice everything."""
    for mutant in MUTANTS.values():
        if mutant.noticed_by == noticed_by:
            assert not notices(mutant, fixtures={"stacks": stacks, "new_rig": new_rig, "caplog": caplog})

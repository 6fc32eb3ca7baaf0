"""Whatever the packages import is declared in pyproject.toml, and the constraints agree with it."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Each runs in the environment of the engine that it measures, and is the only file that imports it.
PEERS = ("vllm.py", "llama_cpp.py")


def imported(files: set[Path]) -> dict[str, str]:
    """Distribution -> one file that imports it, at the top of a module or inside a function."""
    providers = packages_distributions()
    found: dict[str, str] = {}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Import(names=aliases):
                    modules = [alias.name for alias in aliases]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"octavo", "tests"}:
                found.setdefault(canonicalize_name(providers.get(top, [top])[0]), f"{file}:{node.lineno}")
    return found


def declared(root: Path, *extras: str) -> dict[str, Requirement]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + [text for extra in extras for text in project["optional-dependencies"][extra]]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, texts)}


@pytest.mark.parametrize(
    "part, extras", [("engine", ()), ("core/testing", ("testing",)), ("bench", ("bench",)), ("tests", ("testing", "bench", "dev"))]
)
def test_whatever_is_imported_is_declared(part, extras, root, packaged):
    """The engine needs its dependencies alone; the conformance kit, bench and the tests may use their own extras too."""
    apart = {name: set((root / name).rglob("*.py")) for name in ("core/testing", "bench", "tests")}
    files = apart.get(part) or {root / file for file in packaged} - set().union(*apart.values())
    files -= {root / "bench/peers/workers" / name for name in PEERS}
    missing = {name: place for name, place in imported(files).items() if name not in declared(root, *extras)}
    assert not missing, f"imported but not declared in pyproject.toml: {missing}"


def test_a_peer_is_imported_by_its_worker_alone(root):
    for name in PEERS:
        worker = root / "bench/peers/workers" / name
        others = set((root / "bench/peers").rglob("*.py")) - {worker}
        [peer] = {it for it in imported({worker}) if it.startswith(canonicalize_name(worker.stem))}
        assert peer not in imported(others)


def test_an_undeclared_import_is_seen(tmp_path):
    """The walk sees imports inside functions, and knows distributions whose import has another name."""
    file = tmp_path / "module.py"
    file.write_text("import os, octavo.core\nfrom . import near\ndef f():\n    import yaml.nodes\n    from jinja2 import Template\n")
    assert imported({file}) == {"pyyaml": f"{file}:4", "jinja2": f"{file}:5"}


def test_every_dependency_has_a_lower_bound(root):
    """Without one, an old version that lacks what is used counts as good enough."""
    unbounded = [str(it) for it in declared(root).values() if not any(spec.operator == ">=" for spec in it.specifier)]
    assert unbounded == []


def test_the_constraints_are_allowed_by_the_dependencies(root):
    """`make` installs a torch that the distribution itself accepts."""
    for line in (root / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            assert declared(root)[name].specifier.contains(version)

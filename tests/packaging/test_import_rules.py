"""The layers hold, and import-linter notices each way to break them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# file -> (what it imports, the chain that import-linter must print)
PLANTED = {
    "core/planted_plugin.py": ("octavo.plugins.ops", "octavo.core.planted_plugin -> octavo.plugins.ops"),
    "core/planted_server.py": ("octavo.server", "octavo.core.planted_server -> octavo.server"),
    "core/planted_bench.py": ("octavo.bench", "octavo.core.planted_bench -> octavo.bench"),
    "core/planted_facade.py": ("octavo", "octavo.core.planted_facade -> octavo"),
    "core/planted_cli.py": ("octavo.cli", "octavo.core.planted_cli -> octavo.cli"),
    "plugins/schedulers/planted.py": ("octavo.plugins.kernels", "octavo.plugins.schedulers.planted -> octavo.plugins.kernels"),
    "plugins/ops/planted.py": ("octavo.server", "octavo.plugins.ops.planted -> octavo.server"),
    "plugins/models/planted.py": ("octavo", "octavo.plugins.models.planted -> octavo"),
    "server/planted.py": ("octavo.plugins.models", "octavo.server.planted -> octavo.plugins.models"),
    "bench/planted.py": ("octavo.server", "octavo.bench.planted -> octavo.server"),
}


def lint(root: Path, package: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with the checkout's contracts, over the package in `package`'s folder."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--config", str(root / "pyproject.toml"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(package.parent), "COLUMNS": "300"}
    return subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def package(root: Path, tmp_path: Path) -> Path:
    """A copy of the package as Python sees it."""
    package = tmp_path / "octavo"
    shutil.copytree(root / "src/octavo", package)
    for folder in ("core", "plugins", "server", "bench"):
        shutil.copytree(root / folder, package / folder)
    return package


def test_the_layers_hold(root, package):
    """Core knows nobody, plugins know core, server and bench know core and the facade."""
    result = lint(root, package)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_planted_violation_is_noticed(root, package):
    """One forbidden import of each sort: the report has a line for each."""
    for file, (target, _) in PLANTED.items():
        folder, _, rest = file.partition("/")
        (package / folder / rest).write_text(f"import {target}\n")
    result = lint(root, package)
    report = " ".join(result.stdout.split())
    assert result.returncode == 1
    assert [chain for _, chain in PLANTED.values() if f"{chain} (l.1)" not in report] == []


def test_a_facade_module_without_a_place_is_noticed(root, package):
    """A new file beside the facade must be given its layer."""
    (package / "stray.py").write_text("")
    result = lint(root, package)
    assert result.returncode == 1
    assert "stray" in result.stdout

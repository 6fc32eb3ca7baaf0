"""`make` installs once, always under the constraints, and says what is missing instead of failing somewhere inside."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def make(root: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    program = shutil.which("make")
    assert program, "make is not installed"
    environment = {"PATH": f"{path}:{os.environ['PATH']}"}
    return subprocess.run([program, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=30)


def test_an_old_python_is_refused_with_a_message(root, tmp_path):
    """With no Python 3.11 to be found, the message names what is needed, what was found and how to point at another."""
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 15))):
        (tmp_path / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" || exit 1\n')
        (tmp_path / name).chmod(0o755)
    result = make(root, "demo", f"VENV={tmp_path / 'venv'}", path=str(tmp_path))
    assert result.returncode == 2
    assert "Octavo needs Python 3.11 or newer with its venv module. Found: Python 3.9.2" in result.stderr
    assert "make PYTHON=/path/to/python3" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("target", ["demo", "test", "bench"])
def test_a_first_run_installs_under_the_constraints(target, root, tmp_path):
    """Without them demo and tests would run on whatever torch is newest."""
    (install,) = (line for line in make(root, "--dry-run", target, f"VENV={tmp_path}").stdout.splitlines() if "pip install" in line)
    assert "--constraint constraints.txt" in install


def test_a_second_run_installs_nothing(root, tmp_path):
    """As long as what the installation depends on is unchanged."""
    (tmp_path / "bin").mkdir()
    for stamp in ("bin/python", ".installed", ".dev"):
        (tmp_path / stamp).touch()
    assert "pip install" not in make(root, "--dry-run", "demo", "test", "lint", f"VENV={tmp_path}").stdout
    os.utime(tmp_path / ".dev", (0, 0))
    assert "pip install" in make(root, "--dry-run", "test", f"VENV={tmp_path}").stdout


def test_a_regression_is_measured_against_the_newest_version(root, tmp_path):
    """By its number: 0.10.0 comes after 0.9.0. Another file may be named, and without any there is nothing to compare with."""
    kept = tmp_path / "docs/benchmarks/baseline"
    kept.mkdir(parents=True)
    for needed in ("pyproject.toml", "setup.py", "constraints.txt", "bin/python", ".installed"):
        (tmp_path / needed).parent.mkdir(exist_ok=True)
        (tmp_path / needed).touch()
    shutil.copy(root / "Makefile", tmp_path)

    def planned(*arguments: str) -> str:
        return make(tmp_path, "--dry-run", "regression", "VENV=.", *arguments).stdout

    assert 'test -n "" || { echo "There is nothing to compare with' in planned()
    for version in ("0.2.0", "0.10.0", "0.9.0"):
        (kept / f"{version}.json").touch()
    assert "bench compare docs/benchmarks/baseline/0.10.0.json build/regression" in planned()
    assert "bench compare mine.json build/regression" in planned("OCTAVO_BASELINE=mine.json")

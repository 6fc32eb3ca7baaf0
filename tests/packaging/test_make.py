"""`make` says what is missing instead of failing somewhere inside."""

from __future__ import annotations

import os
import shutil
import subprocess


def test_an_old_python_is_refused_with_a_message(root, tmp_path):
    """With no Python 3.11 to be found, the message names what is needed, what was found and how to point at another."""
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 15))):
        (tmp_path / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" || exit 1\n')
        (tmp_path / name).chmod(0o755)
    make = shutil.which("make")
    assert make, "make is not installed"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [make, "demo", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert "Octavo needs Python 3.11 or newer with its venv module. Found: Python 3.9.2" in result.stderr
    assert "make PYTHON=/path/to/python3" in result.stderr
    assert not (tmp_path / "venv").exists()

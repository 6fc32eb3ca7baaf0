"""The reference pages are what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    """`make docs` would change nothing: hooks, options, parameters, commands, stacks and mutants are documented as they are."""
    done = subprocess.run([sys.executable, "docs/build_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr

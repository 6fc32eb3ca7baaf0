"""The library is found, loaded at the level that is asked for, and its absence is explained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.core.native import absence, library, load
from octavo.core.native.library import LEVELS, Library, levels
from octavo.core.native.presence import path

built = pytest.mark.skipif(absence() is not None, reason="built without a compiler")


@built
def test_the_best_level_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment asks for a lower one; each level runs all that those before it do."""
    monkeypatch.delenv("OCTAVO_NATIVE_LEVEL", raising=False)
    assert levels() == LEVELS[: len(levels())]
    assert load().level == levels()[-1]
    monkeypatch.setenv("OCTAVO_NATIVE_LEVEL", "plain")
    assert load().level == "plain"


@built
def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that there are."""
    monkeypatch.setenv("OCTAVO_NATIVE_LEVEL", "avx1024")
    with pytest.raises(ConfigError, match=r"native level 'avx1024' \(OCTAVO_NATIVE_LEVEL\) cannot be used here; this processor runs plain"):
        load()


def test_absence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a library that was never built, and of one that the environment names."""
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    assert str(tmp_path / "none.so") in (absence() or "")
    with pytest.raises(ConfigError, match="what was chosen needs the native library, but OCTAVO_NATIVE_LIBRARY names"):
        load()
    monkeypatch.delenv("OCTAVO_NATIVE_LIBRARY")
    monkeypatch.setattr("octavo.core.native.presence.__file__", str(tmp_path / "presence.py"))
    assert "there was no C++ compiler when it was built" in (absence() or "")
    assert path() == tmp_path / "liboctavo.so"
    (tmp_path / "native_build.txt").write_text("g++ failed with status 1: norm.cpp:1: error: no such thing\n\nand much more\n")
    reason = absence() or ""
    assert "when this Octavo was built: g++ failed with status 1: norm.cpp:1: error: no such thing (all of it is in " in reason
    assert "--no-cache-dir" in reason and "no C++ compiler" not in reason


def test_a_broken_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Say, one that was built on another system."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", str(broken))
    assert absence() is None
    with pytest.raises(ConfigError, match=r'broken.so cannot be loaded: .*Build it on this machine .*ops.plugin = "torch"'):
        load()


@built
def test_a_library_of_other_sources_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, one that was built before a function was added."""
    monkeypatch.setitem(library._SIGNATURES, "later", [])
    with pytest.raises(ConfigError, match=r"has no later: it was built from other sources\. Install Octavo again"):
        Library(library._loaded(str(path())), "plain")


@built
def test_openmp_is_torchs() -> None:
    """One libgomp in the process, whoever is imported first."""
    code = (
        "from octavo.core.native import load; load()\n"
        "import torch; torch.ones(99999).exp()\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.stdout.strip() == "1", done.stderr


def test_asking_for_it_loads_nothing() -> None:
    """`octavo plugins` asks `absence()`, and stays without torch."""
    code = "import sys; from octavo.core.native import absence; absence(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr

"""The library is found, loaded at the level that is asked for, and its absence is explained."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.core.assembly import load_model
from octavo.core.errors import ConfigError, IncompatibleStackError
from octavo.core.native import absence, library, load
from octavo.core.native.library import LEVELS, Library, levels
from octavo.core.native.presence import missing, path
from octavo.core.settings.config import load_config
from octavo.core.settings.resolve import resolve
from tests.matrix.stacks import REGISTRY
from tests.models import tiny

built = pytest.mark.skipif(absence() is not None, reason=str(absence()))


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
    assert missing() is None
    assert "needs the native library, but the native library" in (absence() or "")  # torch is in the process: it was tried
    with pytest.raises(ConfigError, match=r'broken.so cannot be loaded: .*Build it on this machine .*ops.plugin = "torch"'):
        load()


@built
def test_a_library_of_other_sources_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, one that was built before a function was added."""
    monkeypatch.setitem(library._SIGNATURES, "later", [])
    with pytest.raises(ConfigError, match=r"has no later: it was built from other sources\. Install Octavo again"):
        Library(library._loaded(str(path())), "plain")


@built
def test_a_library_of_older_sources_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, an editable install whose sources have changed since: its functions may expect other arguments."""
    library._loaded.cache_clear()
    monkeypatch.setattr(library, "sources_abi", lambda: 1)
    try:
        with pytest.raises(
            ConfigError, match=r"was built from other sources than those in .*: install Octavo again, so that it is built anew"
        ):
            load()
        assert "built from other sources" in (absence() or "")
    finally:
        library._loaded.cache_clear()


@built
def test_without_sources_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed wheel has none: they came with their library."""
    assert library.sources_abi() is not None
    monkeypatch.setattr(library, "_SOURCES", tmp_path)
    assert library.sources_abi() is None


def test_auto_goes_without_a_broken_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a message; naming what needs it is refused."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", str(broken))
    config = load_config(REGISTRY, environ={}, overrides={"model": {"source": str(tiny("llama_gqa"))}})
    told: list[str] = []
    monkeypatch.setattr("octavo.core.assembly.logger.warning", lambda text, *words: told.append(text % words))
    model = load_model(REGISTRY, config)
    names = resolve(REGISTRY, config, model=model.choice, shape=model.shape, facts=model.facts).stack.names
    assert (names["ops"], names["kernel"]) == ("torch", "sdpa")
    [sentence] = told
    assert sentence.startswith("auto goes without kernel 'cpu_paged' (it takes 'sdpa') and ops 'cpu' (it takes 'torch'): needs the native ")
    for named in ({"ops": {"plugin": "cpu"}}, {"kernel": {"plugin": "cpu_paged"}}):
        with pytest.raises(IncompatibleStackError, match=r"broken.so cannot be loaded"):
            load_model(REGISTRY, load_config(REGISTRY, environ={}, overrides={"model": {"source": str(tiny("llama_gqa"))}, **named}))


@built
def test_auto_prefers_torchs_linears_to_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor whose vectors the library has no code for; the kernel stays, which is faster in plain code too."""
    monkeypatch.setenv("OCTAVO_NATIVE_LEVEL", "plain")
    config = load_config(REGISTRY, environ={}, overrides={"model": {"source": str(tiny("llama_gqa"))}})
    model = load_model(REGISTRY, config)
    names = resolve(REGISTRY, config, model=model.choice, shape=model.shape, facts=model.facts).stack.names
    assert (names["ops"], names["kernel"]) == ("torch", "cpu_paged")


def tiles_are_lent() -> bool:
    """Whether Linux lets this process use AMX: the call that asks for it (arch_prctl, its manual page)."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@built
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64", reason="there is no list of what Linux sees")
def test_levels_are_those_that_linux_sees() -> None:
    """Linux lists what the processor has and it saves the registers of."""
    flags = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split())
    needed = {
        "plain": set(),
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512_bf16"},
        "amx_bf16": {"amx_tile", "amx_bf16"},
    }
    if not tiles_are_lent():
        flags -= needed["amx_bf16"]
    assert levels() == tuple(itertools.takewhile(lambda level: needed[level] <= flags, LEVELS))


@built
def test_a_level_that_was_left_out_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where this processor would run it: the compiler that built the library was too old for it."""
    best, where = levels()[-1], str(path())
    monkeypatch.setattr(library, "_has", lambda loaded, level: level != best)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    library._library.__wrapped__(where, "plain")
    assert f"the native library has no code for {best}, which this processor runs" in caplog.text
    assert best not in levels()


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

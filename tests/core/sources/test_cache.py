"""The cache holds whole folders only, whatever is killed, runs at the same time, or cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.core.errors import ModelSourceError
from octavo.core.sources import cache, resolve

# The children put a cheap conversion in the real one's place, so that they need not import torch.
KILLED = """
import os, signal, sys
from octavo.core.sources import local, resolve
def half(file, folder, *, report):
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"half")
    (folder / "stray").write_bytes(b"")
    print("half made", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
local.convert_gguf = half
resolve(sys.argv[1])
"""
TWICE = """
import shutil, sys, time
from octavo.core.sources import local, resolve
def copy(file, folder, *, report):
    report("converting")
    time.sleep(0.5)
    shutil.copytree(sys.argv[2], folder, dirs_exist_ok=True)
local.convert_gguf = copy
print("ready", flush=True)
sys.stdin.readline()
found = resolve(sys.argv[1], report=lambda line: print(line, flush=True))
print("found", found.path, flush=True)
"""


def no_check(folder: Path) -> None:
    return


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_conversion_killed_half_way_is_never_used(write_gguf, tmp_path: Path, octavo_home: Path) -> None:
    """kill -9 leaves a partial folder under another name; the next start removes it and converts anew."""
    file = write_gguf(tmp_path / "tiny.gguf")
    child = start(KILLED, str(file))
    output, _ = child.communicate(timeout=120)
    assert "half made" in output
    assert child.returncode == -signal.SIGKILL
    left = list((octavo_home / "gguf").glob("*"))
    assert left and all(path.name.startswith(".") for path in left)
    assert [path for path in left if path.suffix == ".partial"]
    found = resolve(file)
    assert (found.path / "model.safetensors").stat().st_size > 10_000
    assert not (found.path / "stray").exists()
    assert [path for path in (octavo_home / "gguf").iterdir() if path.suffix == ".partial"] == []


def test_two_processes_at_once_convert_once(write_gguf, tiny_model: Path, tmp_path: Path) -> None:
    """Both end with the same folder; one converts, the other waits for it or finds it done."""
    file = write_gguf(tmp_path / "tiny.gguf")
    children = [start(TWICE, str(file), str(tiny_model)) for _ in range(2)]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    outputs = [""] * 2
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for place, child in enumerate(children):
        outputs[place], _ = child.communicate(timeout=120)
    assert [child.returncode for child in children] == [0, 0]
    assert sum("converting" in output for output in outputs) == 1
    assert sum("waiting for another process" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_waiting_is_said_and_bounded(tmp_path: Path, monkeypatch) -> None:
    """A lock held elsewhere is reported, and given up with its path after the bound."""
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.3)
    monkeypatch.setattr(cache, "LOCK_REPORT_S", 0.1)
    folder = tmp_path / "model"
    lines: list[str] = []
    with (
        cache.locked(folder, lines.append),
        pytest.raises(ModelSourceError, match=r"another process has been preparing .*model for over .*the lock is .*\.model\.lock"),
    ):
        cache.obtain(folder, lambda staging: None, check=no_check, report=lines.append)
    assert lines[0] == f"waiting for another process that is preparing {folder}"
    assert len(lines) >= 2
    cache.obtain(folder, lambda staging: None, check=no_check, report=lines.append)
    assert folder.is_dir()


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    """While it is built, and when building or the check fails, nothing stands under the final name."""
    folder = tmp_path / "model"

    def build(staging: Path) -> None:
        with cache.fresh(staging):
            (staging / "weights").write_text("half")
            assert not folder.exists()
            raise ModelSourceError("broken on purpose")

    def reject(path: Path) -> None:
        raise ModelSourceError("not whole")

    with pytest.raises(ModelSourceError, match="broken on purpose"):
        cache.obtain(folder, build, check=no_check, report=print)
    assert names(tmp_path) <= {".model.lock"}
    with pytest.raises(ModelSourceError, match="not whole"):
        cache.obtain(folder, lambda staging: None, check=reject, report=print)
    assert not folder.exists()


def test_an_interrupted_build_finds_what_it_had(tmp_path: Path) -> None:
    """A download goes on from its partial files, and a folder once there is not built again."""
    folder = tmp_path / "model"
    seen: list[set[str]] = []

    def build(staging: Path) -> None:
        seen.append(names(staging))
        (staging / "part").write_text("x")
        if len(seen) == 1:
            raise ModelSourceError("connection lost")

    with pytest.raises(ModelSourceError):
        cache.obtain(folder, build, check=no_check, report=print)
    for _ in range(2):
        cache.obtain(folder, build, check=no_check, report=print)
    assert seen == [set(), {"part"}]
    assert names(folder) == {"part"}
    assert (folder / "part").stat().st_mode & 0o777 == 0o644


def test_old_leftovers_of_other_models_are_swept(tmp_path: Path) -> None:
    """A day-old partial folder goes when its lock is free; a young one, or one at work, stays."""
    old = time.time() - 2 * cache.ABANDONED_S
    for name in ("left", "working", "young"):
        (tmp_path / f".{name}.partial").mkdir()
        if name != "young":
            os.utime(tmp_path / f".{name}.partial", (old, old))
    with cache.locked(tmp_path / "working", print):
        cache.obtain(tmp_path / "model", lambda staging: None, check=no_check, report=print)
    assert {path.name for path in tmp_path.glob("*.partial")} | {path.name for path in tmp_path.glob(".*.partial")} == {
        ".working.partial",
        ".young.partial",
    }


@pytest.mark.parametrize(("code", "text"), [(errno.ENOSPC, "No space left on device"), (errno.EACCES, "Permission denied")])
def test_a_full_disk_or_a_missing_permission_names_the_place(tmp_path: Path, monkeypatch, write_gguf, code: int, text: str) -> None:
    """The error says where, why, and that OCTAVO_HOME moves the cache; nothing half made stays."""
    from safetensors import SafetensorError

    from octavo.core.sources import convert

    file = write_gguf(tmp_path / "tiny.gguf")

    def fail(alone: Path, folder: Path, *, config: object, header: object) -> None:
        raise OSError(code, os.strerror(code), str(folder / "model.safetensors"))

    monkeypatch.setattr(convert, "_convert_weights", fail)
    with pytest.raises(ModelSourceError, match=rf"cannot write .*model\.safetensors: {text}.*set OCTAVO_HOME to a folder on another disk"):
        resolve(file)
    assert [path for path in cache.home().glob("gguf/*") if not path.name.endswith(".lock")] == []

    def fail_in_rust(alone: Path, folder: Path, *, config: object, header: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(convert, "_convert_weights", fail_in_rust)
    with pytest.raises(ModelSourceError, match=r"cannot write .*gguf.*: No space left on device"):
        resolve(file)


def test_a_cache_that_is_a_file_is_named(tmp_path: Path, monkeypatch, write_gguf) -> None:
    """OCTAVO_HOME pointing at no folder is a plain error, not a traceback."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelSourceError, match=r"cannot write .*file.*: (Not a directory|File exists)"):
        resolve(write_gguf(tmp_path / "tiny.gguf"))


def test_octavo_home_moves_the_cache(tmp_path: Path, monkeypatch) -> None:
    """OCTAVO_HOME first, then the XDG cache folder, then ~/.cache."""
    assert cache.home() == tmp_path / "octavo-home"
    monkeypatch.delenv("OCTAVO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.home() == tmp_path / "xdg" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.home() == tmp_path / ".cache" / "octavo"

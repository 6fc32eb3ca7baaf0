"""The cache on disk: each model folder is built once, beside its place, and moved there whole.

    $OCTAVO_HOME (default: $XDG_CACHE_HOME/octavo, ~/.cache/octavo)
    ├── hub/OWNER--NAME/COMMIT/       as fetched; refs/REVISION holds the commit of a branch or tag
    ├── gguf/SHA256-vN/               converted from the GGUF file of that checksum
    └── tokenizers/KEY/               a folder whose tokenizer.json had to be made; its other files are links

A folder under its final name is complete: it appears by one rename, after everything in it was synced. What is being
built is called `.NAME.partial` and guarded by `.NAME.lock`; the operating system frees the lock of a killed process, so
a partial folder whose lock is free is left over, and the next build removes it.

Must not know: what a model is.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.core.errors import ModelSourceError

LOCK_WAIT_S = 3600.0  # another process may be fetching many gigabytes
LOCK_REPORT_S = 15.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)  # what `writing` has advice for
ABANDONED_S = 24 * 3600.0  # a partial download of another model is kept this long, so that it can go on

_PROVENANCE = "octavo.json"

Report = Callable[[str], None]


def home() -> Path:
    """The cache's root: `OCTAVO_HOME`, else `octavo` in the user's cache folder. It need not exist."""
    chosen = os.environ.get("OCTAVO_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "octavo"


def obtain(folder: Path, build: Callable[[Path], None], *, check: Callable[[Path], object], report: Report) -> None:
    """Have `folder` exist and pass `check`; `build(staging)` fills it, in one process at a time.

    `build` may find what an interrupted build left in `staging`. `check` raises `ModelSourceError` for a folder that is
    not whole: an existing one is then built anew, and a new one is not moved into place.
    """
    if _intact(folder, check):
        return
    staging = folder.with_name(f".{folder.name}.partial")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, report):
            if _intact(folder, check):  # another process was faster
                return
            _sweep(folder.parent, keep=staging)
            if folder.exists():
                report(f"the cached copy in {folder} is damaged, making it anew")
                shutil.rmtree(folder)
            staging.mkdir(exist_ok=True)
            build(staging)
            check(staging)
            _sync(staging)
            os.replace(staging, folder)
            _sync_folder(folder.parent)


@contextmanager
def fresh(staging: Path) -> Iterator[None]:
    """Start with an empty `staging`, and leave none behind when building fails."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into a `ModelSourceError` that names the place."""
    try:
        yield
    except OSError as error:
        raise ModelSourceError(
            f"cannot write {error.filename or path}: {error.strerror or error}. "
            "Make room or give permission there, or set OCTAVO_HOME to a folder on another disk."
        ) from error


@contextmanager
def locked(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of `folder`; say so while another process holds it, and give up after `LOCK_WAIT_S`."""
    from filelock import FileLock, Timeout  # here: a model that is already there needs no lock

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    deadline = time.monotonic() + LOCK_WAIT_S
    wait = 0.0
    while True:
        try:
            lock.acquire(timeout=wait)
            break
        except Timeout:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ModelSourceError(
                    f"another process has been preparing {folder} for over {LOCK_WAIT_S:.0f} s. "
                    f"Wait for it or end it; the lock is {lock.lock_file}."
                ) from None
            report(f"waiting for another process that is preparing {folder}")
            wait = min(LOCK_REPORT_S, left)
    try:
        yield
    finally:
        lock.release()


def write_provenance(folder: Path, *, origin: str, revision: str) -> None:
    """Remember in a cached folder where it came from."""
    (folder / _PROVENANCE).write_text(json.dumps({"origin": origin, "revision": revision}, indent=1), encoding="utf-8")


def read_provenance(folder: Path) -> tuple[str, str]:
    """(origin, revision) of a cached folder. Raises `ModelSourceError` where the note is missing or damaged."""
    try:
        note = json.loads((folder / _PROVENANCE).read_text(encoding="utf-8"))
        return str(note["origin"]), str(note["revision"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelSourceError(f"{folder / _PROVENANCE} is missing or damaged. Delete {folder} to make it anew.") from error


def _intact(folder: Path, check: Callable[[Path], object]) -> bool:
    if not folder.is_dir():
        return False
    try:
        check(folder)
    except ModelSourceError:
        return False
    return True


def _sweep(parent: Path, *, keep: Path) -> None:
    """Remove what killed processes left of other models: old partial folders whose lock is free."""
    from filelock import FileLock, Timeout

    for partial in parent.glob(".*.partial"):
        try:
            if partial == keep or time.time() - partial.stat().st_mtime < ABANDONED_S:
                continue
            with FileLock(partial.with_suffix(".lock")).acquire(timeout=0):
                shutil.rmtree(partial, ignore_errors=True)
        except (Timeout, OSError):  # in use, or gone meanwhile
            continue


def _sync(folder: Path) -> None:
    """Make a folder's files readable for others and safe against a power cut."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        if path.is_dir():
            _sync_folder(path)
            continue
        path.chmod(0o644)  # the safetensors library writes 0600
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

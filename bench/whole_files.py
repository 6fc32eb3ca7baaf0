"""Files and folders of results are there whole, or as they were before: they are written beside their place and then put there.

Must not know: what is in them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.core.errors import ResultError


def write_whole(path: str | Path, text: str) -> None:
    """In UTF-8, in place of what was there. What is no file of its own (a link, a pipe) is written to as it is. Raises OSError."""
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    part = _beside(path, "part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write to; when the block is left, it takes the other one's place, and nothing of the other one stays.

    Between two renames there is neither, but both stand beside their place; `recover` goes on from there. Raises OSError.
    """
    folder = folder.resolve()
    recover(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part, old = _beside(folder, "part"), _beside(folder, "old")
    for scrap in (part, old):
        shutil.rmtree(scrap, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        for file in part.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
    except BaseException:
        if folder.exists():  # else both are kept for `recover`
            shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put a folder back in its place that a save left beside it: the new one, which was whole by then, or else the old one.

    Raises ResultError where it cannot be put there.
    """
    if folder.exists() or not (old := _beside(folder, "old")).exists():
        return
    part = _beside(folder, "part")
    try:
        os.replace(part if part.exists() else old, folder)
    except OSError as error:
        raise ResultError(f"{folder} was left half saved, and cannot be put back from {old}: {error.strerror}") from error
    shutil.rmtree(old, ignore_errors=True)


def recover_all(parent: Path) -> None:
    """The same of each folder in this one. Raises ResultError."""
    for old in list(parent.glob(".*.old")):
        recover(parent / old.name.removeprefix(".").removesuffix(".old"))


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")

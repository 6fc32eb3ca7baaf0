"""A file is as it was or as it shall be, never half; of folders see test_runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from octavo.bench.whole_files import recover, whole_folder, write_whole
from octavo.core.errors import ResultError


def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """In UTF-8, and nothing else is left."""
    for text in ("one\n", "zwei ü\n"):
        write_whole(tmp_path / "file", text)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_breaks_off_leaves_the_file_as_it_was(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks it off."""

    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    write_whole(tmp_path / "file", "old")
    monkeypatch.setattr(os, step, broken)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_what_is_no_file_of_its_own_is_written_to(tmp_path: Path) -> None:
    """A link stays one, and a pipe gets it: `--output-json /dev/stdout`."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    write_whole(os.devnull, "gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    """Is an error of the system."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        write_whole(tmp_path / "file" / "x", "text")


def test_a_folder_that_breaks_off_leaves_the_one_before(tmp_path: Path) -> None:
    """With all that it held."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "folder") as part:
        (part / "a").write_text("new")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and (tmp_path / "folder" / "a").read_text() == "old"


def test_the_old_folder_is_put_back_where_there_is_no_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what keeps it from that is said."""
    (tmp_path / ".folder.old").mkdir()

    def broken(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(ResultError, match=r"cannot be put back from .*old: Permission denied"):
        patch.setattr(os, "replace", broken)
        recover(tmp_path / "folder")
    recover(tmp_path / "folder")
    recover(tmp_path / "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]

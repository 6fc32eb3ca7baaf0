"""The files of the tree keep what the package and its readers rely on."""

from __future__ import annotations

import re


def test_every_folder_with_modules_is_a_package(root, packaged):
    """A folder without `__init__.py` would be left out of the wheel."""
    folders = {(root / file).parent for file in packaged}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_modules_are_short_and_named_for_what_they_hold(root, packaged):
    """No file over 400 lines, no drawer for odds and ends, nothing left to do."""
    lines = {file: (root / file).read_text().splitlines() for file in packaged}
    assert {file: len(text) for file, text in lines.items() if len(text) > 400} == {}
    assert [file for file in packaged if re.search(r"\b(utils?|helpers?|misc|common|manager)\.py$", file)] == []
    assert [file for file, text in lines.items() if any(re.search(r"\b(TODO|FIXME|XXX)\b", line) for line in text)] == []

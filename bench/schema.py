"""Results are read by later versions than the one that wrote them: `schema_version` says how one is written, and migrations bring it up.

Must not know: what a result holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.core.errors import ResultError

KEY = "schema_version"
Content = TypeVar("Content")
Migrations = Mapping[int, Callable[[Content], Content]]
"""By schema version: what makes the next version's content of it. Version 1 is the first."""


def migrated(
    content: Content, migrations: Migrations[Content], *, where: Path, to: int, header: Callable[[Content], dict[str, Any]]
) -> Content:
    """The same in schema `to`; `header` gives the table of it that has the version. Raises ResultError if it is newer, or too old."""
    version = header(content).get(KEY)
    if not isinstance(version, int):
        raise ResultError(f"{where} has no {KEY}: it is not of Octavo, or damaged")
    if version > to:
        raise ResultError(f"{where} has schema version {version}, this Octavo reads up to {to}: update Octavo")
    while version < to:
        if version not in migrations:
            raise ResultError(f"{where} has schema version {version}, which this Octavo cannot read any more: measure again")
        content = migrations[version](content)
        version += 1
        header(content)[KEY] = version
    return content

"""Figures as JSON, for programs: the file of `--output-json`, and `metrics.json` of a saved run. Both say in which schema, and of what.

Must not know: what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.bench.schema import KEY
from octavo.bench.whole_files import write_whole
from octavo.core.errors import RequestError

SCHEMA_VERSION = 1  # files without one, of before, have the same figures


def figures_json(figures: Mapping[str, Any], **identities: Mapping[str, Any] | None) -> str:
    """The figures, before them the schema version and with what they were measured; None where that is not known."""
    return json.dumps({KEY: SCHEMA_VERSION, **identities, **figures}, indent=1) + "\n"


def write_json(path: str, figures: Mapping[str, Any], *, identity: Mapping[str, Any]) -> None:
    """Write `figures_json` there. Raises RequestError where it cannot be written."""
    try:
        write_whole(path, figures_json(figures, identity=identity))
    except OSError as error:
        raise RequestError(f"--output-json {path} cannot be written: {error.strerror}", field="output_json") from None

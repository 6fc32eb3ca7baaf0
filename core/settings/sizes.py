"""Sizes of memory as people write them: 44828721152, "4GiB", "512MiB"."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_PATTERN = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})")


def parse_size(value: Any) -> Any:
    """Bytes for a text with a unit; anything but a text is returned as it is. Raises ValueError where a text is no size."""
    if not isinstance(value, str):
        return value
    match = _PATTERN.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"write bytes as a number, or a number with a unit ({', '.join(UNITS)}), like '4GiB'")
    if len(match[1]) > 20:
        raise ValueError("no memory is that large")
    return int(float(match[1]) * UNITS[match[2]])


Size = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(parse_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": f"^{_PATTERN.pattern}$"}]}),
]

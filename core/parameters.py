"""What a request's sets of parameters share: fields that say what they allow, and refusals in those words.

The reference and the JSON schema are made from the same descriptions. Must not know: any one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from octavo.core.errors import RequestError

LARGEST = 2**31 - 1  # every count and id fits an int32 tensor
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Length = Annotated[int, Field(ge=1, le=LARGEST)]


def spec(description: str, allowed: str, **bounds: Any) -> Any:
    """A field's documentation and bounds. `allowed` says in words what `bounds` and the type check."""
    return Field(description=description, json_schema_extra={"allowed": allowed}, **bounds)


def list_as_tuple(value: object) -> object:
    """JSON has lists, a hashable object needs tuples; whatever else it may be is left for the type check to refuse."""
    return tuple(value) if isinstance(value, list) else value


def allowed(field: FieldInfo) -> str:
    """What a parameter may be, in words: for error messages and the reference."""
    extra = field.json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else ""


def shown(value: object, most: int = 60) -> str:
    """A value that somebody gave, for a message: at most `most` characters, and no error of its own, which reprs may raise."""
    try:
        text = repr(value)
    except Exception:  # Python writes no integer of more than 4,300 digits, and a caller's own class may do anything
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def refuse(error: ErrorDetails, fields: Mapping[str, FieldInfo], *, kind: str) -> NoReturn:
    """Say pydantic's first complaint in our words: which parameter, what it was, what it may be. Raises RequestError.

    `fields` in the order of declaration, which is that of positional arguments; `kind` of parameters: "sampling".
    """
    first, *inner = error["loc"]
    field = list(fields)[first] if isinstance(first, int) and first < len(fields) else str(first)
    if field not in fields:
        near = get_close_matches(field, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
        raise RequestError(f"unknown {kind} parameter {field}: {hint}", field=field)
    where = field + "".join(f"[{index}]" for index in inner if isinstance(index, int))
    raise RequestError(f"{where} = {shown(error['input'])}: must be {allowed(fields[field])}", field=field)

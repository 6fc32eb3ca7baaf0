"""What a structured output must follow: the part of `SamplingParams` that a grammar is made from.

Exactly one kind is given. Whether it can be compiled is known when the request is submitted (`octavo.core.grammar`).
Must not know: the grammar engine, tokenizers, torch.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from octavo.core.errors import RequestError
from octavo.core.parameters import shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
LONGEST = 1_000_000  # characters of a schema, an expression or a grammar


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class StructuredOutputsParams:
    """Frozen and hashable; names as in vLLM. Raises RequestError that names the field `structured_outputs`.

    `json`: a JSON schema, as text or as the object itself (kept as text). `regex`: the whole output matches it. `choice`: the output is
    one of these. `grammar`: in Lark's notation. `json_object`: any JSON object. `disable_any_whitespace`: JSON without optional
    white space.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    @field_validator("json", mode="before")
    @classmethod
    def _schema_as_text(cls, value: object) -> object:
        if not isinstance(value, dict | bool):
            return value
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON schema: {error}") from error

    @field_validator("choice", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler: Any) -> StructuredOutputsParams:
        try:
            params: StructuredOutputsParams = handler(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            given = data.kwargs if isinstance(data, ArgsKwargs) else data
            raise _refused(f"{where}: {first['msg']} (known: {', '.join((*KINDS, 'disable_any_whitespace'))})", given) from error
        params._check_together()
        return params

    def _check_together(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise _refused(f"exactly one of {', '.join(KINDS)} must be given, not {' and '.join(given) or 'none'}")
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise _refused("choice must be a list of texts, none of them empty")
        for kind in ("json", "regex", "grammar"):
            text = getattr(self, kind)
            if text is not None and not 0 < len(text) <= LONGEST:
                raise _refused(f"{kind} must have 1 to {LONGEST:,} characters, not {len(text):,}")

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))


def _refused(message: str, given: object = None) -> RequestError:
    got = "" if given is None else f", got {shown(given, 80)}"
    return RequestError(f"structured_outputs: {message}{got}", field="structured_outputs")

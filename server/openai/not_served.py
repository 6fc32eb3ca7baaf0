"""`NotServed`: a field of OpenAI's that changes the answer and that this server does not have. It is refused by name, with the reason.

Must not know: any one field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True, slots=True)
class NotServed:
    """Annotates a field: only what its type allows is taken, for anything else the reason is told."""

    reason: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The field's own schema, with another refusal."""
        return core_schema.no_info_wrap_validator_function(self._refuse, handler(source), serialization=None)

    def _refuse(self, value: Any, check: core_schema.ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValueError as error:
            raise PydanticCustomError("not_served", "{reason}", {"reason": self.reason}) from error

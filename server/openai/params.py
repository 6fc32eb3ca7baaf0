"""What a request asks for, as `SamplingParams`.

Must not know: engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.errors import ApiError
from octavo.server.openai.common_schema import SAMPLING, ResponseFormat, SamplingFields
from octavo.server.settings import ServerSettings


def sampling_params(
    body: SamplingFields, *, defaults: Mapping[str, Any], settings: ServerSettings, **fields: Any
) -> tuple[SamplingParams, int]:
    """The params, and how many times their one answer is given: greedy outputs are all alike, so one is made for all n.

    `defaults`: the model's own, for what the body leaves open. `fields`: what is named otherwise in the body; None is left open too.
    Raises RequestError, or ApiError for what cannot be asked together.
    """
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    given.update({name: value for name, value in fields.items() if value is not None})
    given.setdefault("timeout_s", settings.timeout_s)
    if settings.max_timeout_s is not None and (given["timeout_s"] is None or given["timeout_s"] > settings.max_timeout_s):
        if body.timeout_s is not None:
            raise ApiError(400, f"timeout_s = {body.timeout_s:g}: this server allows {settings.max_timeout_s:g}", param="timeout_s")
        given["timeout_s"] = settings.max_timeout_s
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: only with stream = true", param="stream_options")
    copies = given.get("n", 1)
    asked = SamplingParams(**{**defaults, **given, "n": 1})
    if asked.greedy and copies > 1 and asked.best_of is None:
        SamplingParams(n=copies, temperature=1.0)  # is checked all the same
        return asked, copies
    return replace(asked, n=copies), 1


def structure(body: SamplingFields, response_format: ResponseFormat | None) -> StructuredOutputsParams | None:
    """What `response_format` means. Raises ApiError."""
    if response_format is None or response_format.type == "text":
        return None
    if body.structured_outputs is not None:
        raise ApiError(400, "response_format and structured_outputs say the same in two ways: give one", param="response_format")
    if response_format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        raise ApiError(400, "response_format of type json_schema needs json_schema.schema", param="response_format.json_schema")
    return StructuredOutputsParams(json=response_format.json_schema.schema_)  # type: ignore[arg-type]

"""What a request asks for, as `SamplingParams` or `BeamSearchParams`.

Must not know: engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.beam_search_params import FIELDS as OF_BEAMS, MAX_BEAM_WIDTH, BeamSearchParams
from octavo.core.sampling_params import FIELDS, SamplingParams
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.errors import ApiError
from octavo.server.openai.common_schema import SAMPLING, ResponseFormat, SamplingFields
from octavo.server.settings import ServerSettings

ONLY_OF_BEAMS = ("length_penalty", "early_stopping")
FINE_WITH_BEAMS = ("n", "seed", "priority")  # they name or order a request, or change no beam


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the engine is asked for. `width`: outputs that it gives. `copies`: how often each of them is given to the client."""

    params: SamplingParams | BeamSearchParams
    width: int = 1
    copies: int = 1


def wanted(
    body: SamplingFields, *, of_model: Mapping[str, Any], defaults: Mapping[str, Any], settings: ServerSettings, **fields: Any
) -> Wanted:
    """Greedy outputs are all alike, so one is made for all n.

    `of_model`: how the model's files say to sample, and `defaults`: the route's own, for what the body leaves open; how long an answer
    may be is the route's. `fields`: what is named otherwise in the body; None is left open too.
    Raises RequestError, or ApiError for what cannot be asked together.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: only with stream = true", param="stream_options")
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    given.update({name: value for name, value in fields.items() if value is not None})
    _limit_time(given, body.timeout_s, settings)
    if body.use_beam_search:
        return _beams(body, {**defaults, **given})
    for name in ONLY_OF_BEAMS:
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name}: only with use_beam_search = true", param=name)
    n, best_of = given.pop("n", 1), given.pop("best_of", None)
    params = SamplingParams(**{**of_model, **defaults, **given})
    if params.greedy and (n, best_of) != (1, None):
        SamplingParams(n=n, best_of=best_of)  # is checked all the same
        return Wanted(params, 1, n)
    return Wanted(replace(params, n=n, best_of=best_of), n)


def _limit_time(given: dict[str, Any], asked: float | None, settings: ServerSettings) -> None:
    given.setdefault("timeout_s", settings.timeout_s)
    most = settings.max_timeout_s
    if most is not None and (given["timeout_s"] is None or given["timeout_s"] > most):
        if asked is not None:
            raise ApiError(400, f"timeout_s = {asked:g}: this server allows {most:g}", param="timeout_s")
        given["timeout_s"] = most


def _beams(body: SamplingFields, given: Mapping[str, Any]) -> Wanted:
    """n beams. What would change sampling, and no beam, is refused by name; values that change nothing are fine."""
    width = given.get("n", 1)
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise ApiError(400, f"n = {width}: beam search follows 1 to {MAX_BEAM_WIDTH} beams", param="n")
    own = {name: value for name, value in given.items() if name in OF_BEAMS}
    for name, value in given.items():
        neutral = (FIELDS[name].default,) if name != "temperature" else (0, 1)
        if name not in own and name not in FINE_WITH_BEAMS and value not in (*neutral, [], {}):
            raise ApiError(400, f"{name}: beam search does not sample, so leave it out", param=name)
    own |= {name: value for name in ONLY_OF_BEAMS if (value := getattr(body, name)) is not None}
    return Wanted(BeamSearchParams(beam_width=width, **own), width)


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

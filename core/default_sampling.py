"""What a model's own `generation_config.json` says of sampling, for calls that bring no params.

As in vLLM, six entries count, where they are there: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens (as
max_tokens). `do_sample` does not: many files hold a temperature to sample with beside `do_sample = false`, which is what transformers
writes unless told otherwise. So a model is greedy by default only where its file says `temperature = 0`.

Must not know: engines, where the file came from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import RequestError
from octavo.core.sampling_params import FIELDS, SamplingParams

logger = logging.getLogger("octavo")

NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Entry of the file -> field of SamplingParams."""


def read_defaults(generation_config: Mapping[str, Any], *, file: str) -> dict[str, Any]:
    """The fields that the file sets to something else than Octavo's own defaults. What cannot be used is warned of and left out."""
    found: dict[str, Any] = {}
    for name, field in NAMES.items():
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            checked = getattr(SamplingParams(**{field: value}), field)
        except RequestError as error:
            as_field = "" if name == field else f" (max_new_tokens = {value!r:.60})"
            logger.warning("%s: %s%s; Octavo's own default is used", file, error, as_field)
            continue
        if checked != FIELDS[field].default:
            found[field] = checked
    return found


def describe_defaults(defaults: Mapping[str, Any], *, file: str, used: bool) -> str:
    """The line for the log at start: what is in force, and where from."""
    if not used:
        return 'sampling defaults: Octavo\'s own (engine.generation_config = "none")'
    if not defaults:
        return f"sampling defaults: Octavo's own ({file} sets none)"
    values = ", ".join(f"{field} = {value:g}" for field, value in defaults.items())
    return f"sampling defaults: {values} ({file}); params that a call brings are taken as they are"


def default_params(defaults: Mapping[str, Any], *, prompt_len: int, max_model_len: int, max_tokens: int | None) -> SamplingParams:
    """Params for a call that brings none. A default `max_tokens` that the context does not hold means the rest of the context.

    `max_tokens`: what counts where the model's file is silent.
    """
    params = {"max_tokens": max_tokens, **defaults}
    if "max_tokens" in defaults and prompt_len + defaults["max_tokens"] > max_model_len:
        params["max_tokens"] = None
    return SamplingParams(**params)

"""What a body leaves open: the model's own way to sample, then the route's defaults, then Octavo's."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.sampling_params import SamplingParams
from octavo.server.openai.completions_schema import CompletionRequest
from octavo.server.openai.params import wanted
from octavo.server.settings import ServerSettings

OF_MODEL = {"temperature": 0.2, "top_p": 0.8, "max_tokens": 7}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"temperature": 0.2, "top_p": 0.8, "max_tokens": 16}),
        ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8, "max_tokens": 16}),
        ({"temperature": 0, "top_p": 1, "max_tokens": 3}, {"temperature": 0, "top_p": 1, "max_tokens": 3}),
    ],
)
def test_the_models_own_defaults_count(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    """As in vLLM, where the body says nothing; the length is the route's."""
    body = CompletionRequest(prompt="x", **asked)
    made = wanted(body, of_model=OF_MODEL, defaults={"max_tokens": 16}, settings=ServerSettings(), max_tokens=body.max_tokens)
    assert made.params == SamplingParams(**expected)


def test_beams_do_not_sample() -> None:
    """Defaults of sampling are no part of beam search, and do not make it refuse."""
    body = CompletionRequest(prompt="x", n=2, use_beam_search=True)
    made = wanted(body, of_model=OF_MODEL, defaults={"max_tokens": 16}, settings=ServerSettings())
    assert made.params == BeamSearchParams(beam_width=2, max_tokens=16)

"""The JSON Schema test suite through an engine: a random model, biased to what closes, writes to each schema, and `jsonschema` judges."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from octavo import LLM, SamplingParams
from tests.core.grammar.suite import compiled

CLOSING = {'"': 60.0, "}": 60.0, "]": 60.0, "1": 40.0, " ": -60.0, "\n": -60.0}
"""Added to the logits of these characters, so that a random model comes to an end."""


@pytest.mark.slow
def test_what_a_random_model_ends_is_valid(new_llm: Callable[..., LLM]) -> None:
    """All schemas that compile, in one batch: each output that its grammar ended is valid; at least 150 end."""
    groups = compiled()
    llm = new_llm(max_model_len=256, num_kv_slots=16384, max_num_seqs=64, debug=False)
    encode = llm.built.loaded.tokenizer.encode  # type: ignore[union-attr]
    bias = {encode(character)[0]: value for character, value in CLOSING.items()}
    params = [
        SamplingParams(max_tokens=200, seed=7, logit_bias=bias, structured_outputs={"json": json.dumps(group.schema)}) for group in groups
    ]
    answers = llm.generate([{"prompt_token_ids": [1, 2, 3]}] * len(groups), params, use_tqdm=False)
    ended = [(group, answer.outputs[0]) for group, answer in zip(groups, answers, strict=True) if answer.outputs[0].finish_reason == "stop"]
    validator: Any = jsonschema.Draft202012Validator
    for group, output in ended:
        jsonschema.validate(json.loads(output.text), group.schema, cls=validator, format_checker=validator.FORMAT_CHECKER)
    assert len(ended) >= 150
    assert not [answer.outputs[0].error for answer in answers if answer.outputs[0].finish_reason == "error"]

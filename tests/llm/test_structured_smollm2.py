"""A real model: what it says with a grammar is valid, and says something."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMAS: dict[str, Any] = {
    "a fruit": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "colour": {"enum": ["red", "green", "yellow"]}},
        "required": ["name", "colour"],
        "additionalProperties": False,
    },
    "a date and a number": {
        "type": "object",
        "properties": {"date": {"type": "string", "format": "date"}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["date", "number"],
        "additionalProperties": False,
    },
    "a list": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,8}$"}, "minItems": 3, "maxItems": 3},
    "a tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": {"type": "integer", "maximum": 999, "minimum": 0}, "next": {"type": ["null"]}},
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="smollm2-135m", device="cpu", max_model_len=512, num_kv_slots=4096, max_num_seqs=8) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_is_valid(llm: LLM, temperature: float) -> None:
    """All schemas in one batch, beside a request without one."""
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=150, structured_outputs=StructuredOutputsParams(json=schema))
        for schema in SCHEMAS.values()
    ]
    prompts = [f"Write {name} as JSON: " for name in SCHEMAS]
    outputs = llm.generate([*prompts, "Once upon a time"], [*params, SamplingParams(max_tokens=20)], use_tqdm=False)
    ended = 0
    for schema, output in zip(SCHEMAS.values(), outputs[:-1], strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            ended += 1
            validator = jsonschema.Draft202012Validator
            jsonschema.validate(json.loads(answer.text), schema, cls=validator, format_checker=validator.FORMAT_CHECKER)
        else:
            assert answer.finish_reason == "length"
    assert ended >= 3
    assert outputs[-1].outputs[0].finish_reason in ("length", "stop") and outputs[-1].outputs[0].text


def test_it_answers_within_the_form(llm: LLM) -> None:
    """A question, its answer one of some choices, an expression, an arithmetic term."""
    wanted = [
        StructuredOutputsParams(choice=(" London", " Paris", " Rome")),
        StructuredOutputsParams(regex=r" 19[0-9]{2}\."),
        StructuredOutputsParams(grammar='start: " " term\nterm: /[1-9][0-9]?/ | "(" term "+" term ")"'),
    ]
    prompts = ["The capital of France is", "The first moon landing was in", "A sum:"]
    params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=one) for one in wanted]
    place, year, term = (output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False))
    assert place.text == " Paris"
    assert re.fullmatch(r" 19\d\d\.", year.text) and year.finish_reason == "stop"
    assert term.finish_reason == "length" or ast.parse(term.text.strip(), mode="eval")

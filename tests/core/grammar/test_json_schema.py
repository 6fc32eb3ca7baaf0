"""JSON schemas against the public test suite, with `jsonschema` as the judge of what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from octavo.core.errors import RequestError
from octavo.core.grammar.compiler import GrammarCompiler
from octavo.core.structured_outputs import StructuredOutputsParams
from tests.core.grammar.conftest import walk
from tests.core.grammar.suite import compiled, groups, verdicts

Compilers = Callable[[str], GrammarCompiler]
KINDS = ("byte_level", "sentencepiece", "unigram", "wordpiece")

OURS: dict[str, Any] = {
    "a person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
            "home": {"$ref": "#/$defs/place"},
        },
        "required": ["name", "age", "tags", "home"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["zip"]}},
    },
    "a tree": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
        "$ref": "#/$defs/node",
        "required": ["next"],
    },
    "steps of a number": {"type": "array", "items": {"type": "number", "multipleOf": 0.25, "exclusiveMinimum": -3, "maximum": 7.5}},
    "a union": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind", kind]}
            for kind in ("cat", "dog", "eel")
        ]
    },
    "all of two": {"allOf": [{"type": "string", "minLength": 3}, {"maxLength": 5}, {"pattern": "^[a-f]+$"}]},
    "formats": {
        "type": "object",
        "properties": {"at": {"format": "date-time", "type": "string"}, "id": {"format": "uuid", "type": "string"}},
        "required": ["at", "id"],
    },
    "a table": {"type": "array", "prefixItems": [{"const": "x"}, {"type": "boolean"}], "items": False, "minItems": 2},
}


def check(text: str, schema: Any) -> None:
    """Raises where the text is no JSON, or is not valid."""
    validator = jsonschema.Draft202012Validator
    jsonschema.validate(json.loads(text), schema, cls=validator, format_checker=validator.FORMAT_CHECKER)


@pytest.mark.parametrize("group", compiled(), ids=lambda group: group.name)
def test_what_a_grammar_ended_is_valid(group: Any, compiler: Compilers) -> None:
    """Drawn at random from what is allowed, each output that may end is valid by jsonschema."""
    for seed in range(3):
        made = walk(compiler, "bytes", seed=seed, json=json.dumps(group.schema))
        assert made.ended, made.text
        check(made.text, group.schema)


def test_the_suite_is_there() -> None:
    """Fewer than 150 schemas would mean that the tests above test little."""
    assert len(groups()) == 373
    assert len(compiled()) >= 170
    assert len({group.topic for group in compiled()}) >= 40


# llguidance knows neither leap years nor leap seconds.
CALENDAR = ("format/date", "format/date-time", "format/time")


def test_no_invalid_instance_is_taken() -> None:
    """Of all 1,712 instances of the suite, no invalid one follows its schema's grammar to the end, calendars aside."""
    taken, valid = [], 0
    for group, matcher, error in verdicts():
        for data, is_valid in group.instances if not error else ():
            one, text = matcher.deep_copy(), list(json.dumps(data).encode())
            if one.try_consume_tokens(text) == len(text) and one.is_accepting():
                valid += is_valid
                if not is_valid:
                    taken.append((group.topic, data))
    assert valid > 300
    assert {topic for topic, _ in taken} == set(CALENDAR)
    assert all(":60" in data or data == "2021-02-29" for _, data in taken), taken


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("compact", [False, True], ids=["spaced", "compact"])
def test_with_every_kind_of_tokenizer(name: str, kind: str, compact: bool, compiler: Compilers) -> None:
    """Tokens of several characters, of bytes, with spaces of their own: what ended is valid; few walks meet a dead end."""
    ended = 0
    for seed in range(6):
        made = walk(compiler, kind, seed=seed, json=json.dumps(OURS[name]), disable_any_whitespace=compact)
        if made.ended:
            ended += 1
            check(made.text, OURS[name])
            if compact:
                assert json.dumps(json.loads(made.text), separators=(",", ":"), ensure_ascii=False).count(" ") == made.text.count(" ")
    assert ended or kind == "wordpiece"  # it writes a space before every word, so that most keys cannot be written


@pytest.mark.parametrize("seed", range(4))
def test_any_object(seed: int, compiler: Compilers) -> None:
    """`json_object` gives an object and nothing else."""
    made = walk(compiler, "byte_level", seed=seed, json_object=True)
    assert made.ended and isinstance(json.loads(made.text), dict)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"type": ', "no JSON schema: Expecting value"),
        ("[1]", "must be an object, true or false"),
        ("false", "the schema is false"),
        ('{"type": "frob"}', "Invalid type: frob"),
        ('{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ('{"$ref": "#"}', "no token of this model's vocabulary goes on with it"),
        ('{"$ref": "file:///etc/hostname"}', "does not fetch"),
        ('{"x-guidance": 3}', "x-guidance must be an object"),
        ('{"x-guidance": {"lenient": true}, "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        ('{"enum": ["\\ud800"]}', "hex escape"),
    ],
)
def test_what_cannot_be_followed_is_refused(schema: str, words: str, compiler: Compilers) -> None:
    """In the grammar engine's words, with the field named; never followed in part."""
    with pytest.raises(RequestError) as error:
        compiler("bytes").compile(StructuredOutputsParams(json=schema))
    assert words in str(error.value)
    assert error.value.field == "structured_outputs"
    assert "no_forcing" not in str(error.value)

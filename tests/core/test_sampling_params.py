"""Defaults are those people know; whatever can't be meant is refused with the field's name, its value and what it may be."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from pydantic import TypeAdapter

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import RequestError
from octavo.core.parameters import LARGEST, allowed
from octavo.core.sampling_params import FIELDS, SamplingParams, validate_for
from octavo.core.structured_outputs import StructuredOutputsParams

NAN, INF = float("nan"), float("inf")


def test_defaults() -> None:
    """Those of vLLM's SamplingParams and of OpenAI's completions (fault 25: 16 tokens)."""
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.skip_special_tokens) == ((), (), False, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, 65, -1, True, 1.0, "1", None)),
        *(("temperature", value) for value in (-0.1, NAN, INF, -INF, True, "0.7", None)),
        *(("top_p", value) for value in (0, -0.1, 1.01, NAN, True, "1")),
        *(("top_k", value) for value in (-2, 1.5, False, "5", LARGEST + 1)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN, True)),
        *(("seed", value) for value in (1.5, True, "1", 2**63, -(2**63) - 1)),
        *(("max_tokens", value) for value in (0, -1, 1.0, True, "16", LARGEST + 1)),
        *(("min_tokens", value) for value in (-1, 1.0, True, None)),
        *(("stop", value) for value in ("", ["a", ""], 3, ["a", 3], {"a"}, b"a", ["a"] * 33, "a" * 257)),
        *(("stop_token_ids", value) for value in (5, "5", [1, -1], [True], [1.0], None)),
        *(("ignore_eos", value) for value in (1, "true", None)),
        *(("include_stop_str_in_output", value) for value in (0, "no")),
        *(("skip_special_tokens", value) for value in (0, None)),
        *(("cache_salt", value) for value in (None, 1, b"x")),
        *(("known_output_len", value) for value in (0, 1.0, True)),
    ],
)
def test_bad_values_name_the_field_and_what_it_may_be(field: str, value: Any) -> None:
    """Out of range, NaN, of a wrong type, a bool for a number: refused, never converted (fault 27)."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{"ignore_eos": True, field: value})
    assert caught.value.field == field
    message = str(caught.value)
    assert message.startswith((f"{field} = ", f"{field}["))
    assert message.endswith(f": must be {allowed(FIELDS[field])}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_p": 1.5}, "top_p = 1.5: must be a number above 0, at most 1"),
        ({"n": True}, "n = True: must be a whole number from 1 to 64"),
        ({"stop_token_ids": [7, -1]}, "stop_token_ids[1] = -1: must be a list of token ids of the model's vocabulary"),
        ({"min_tokens": 17}, "min_tokens = 17: must be at most max_tokens, which is 16"),
        (
            {"n": 2, "temperature": 0},
            "n = 2 with temperature = 0.0: greedy sampling gives 2 equal outputs; ask for n = 1, or a temperature of at least 1e-05",
        ),
        ({"known_output_len": 3}, "known_output_len = 3: an EOS could end the output sooner; set ignore_eos = True as well"),
        ({"known_output_len": 17, "ignore_eos": True}, "known_output_len = 17: must be at most max_tokens, which is 16"),
        ({"max_token": 3}, "unknown sampling parameter max_token: did you mean max_tokens?"),
    ],
)
def test_messages(given: dict[str, Any], message: str) -> None:
    """The very words."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert str(caught.value) == message


def test_an_unlike_name_lists_the_known_ones() -> None:
    """Nothing near: all names."""
    with pytest.raises(RequestError, match=r"^unknown sampling parameter zzz: known are n, temperature, .*known_output_len$"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("value", [10**5000, [10**5000], _Unprintable()], ids=["integer", "list", "object"])
@pytest.mark.parametrize("params", [SamplingParams, BeamSearchParams, StructuredOutputsParams])
def test_a_value_that_cannot_be_written_out_is_refused_too(params: Any, value: Any) -> None:
    """Python writes no integer of more than 4,300 digits: the refusal is ours all the same, and names the field."""
    fields = {StructuredOutputsParams: ("regex", "choice")}.get(params, ("max_tokens", "stop_token_ids"))
    for field in fields:
        with pytest.raises(RequestError, match="that cannot be shown>") as raised:
            params(**{field: value} | ({"beam_width": 2} if params is BeamSearchParams else {}))
        assert raised.value.field == ("structured_outputs" if params is StructuredOutputsParams else field)


def test_positional_arguments_are_named_in_errors_too() -> None:
    """A number of a position would say nothing."""
    with pytest.raises(RequestError, match=r"^temperature = -2\.0: "):
        SamplingParams(1, -2.0)


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("n", 1, 64),
        ("temperature", 0, 1e6),
        ("top_p", 1e-9, 1),
        ("top_k", -1, LARGEST),
        ("min_p", 0, 1),
        ("seed", -(2**63), 2**63 - 1),
        ("max_tokens", 1, LARGEST),
        ("min_tokens", 0, 16),
        ("known_output_len", 1, 16),
        ("stop", "a", ["a" * 256] * 32),
    ],
)
def test_both_ends_of_each_range_are_allowed(field: str, least: Any, most: Any) -> None:
    """The words in `allowed` and the bounds agree: what they include passes."""
    for value in (least, most):
        SamplingParams(**{"ignore_eos": True, field: value})


def test_kinds_of_stop() -> None:
    """One string, a list, a tuple or None are stored as a tuple; -1 and 0 both switch top-k off."""
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == SamplingParams(stop=("a", "b")).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    """Below 1e-5 nothing is divided (fault 32)."""
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_a_value_object() -> None:
    """Equal, hashed, pickled, copied with changes that are checked, and frozen."""
    params = SamplingParams(temperature=0.7, max_tokens=256, stop=["\n"])
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(dataclasses.replace(params)) == hash(params)
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3
    with pytest.raises(RequestError, match="max_tokens = 0"):
        dataclasses.replace(params, max_tokens=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    """Description and range of each stand in the schema, which the reference is made from."""
    properties = TypeAdapter(SamplingParams).json_schema()["properties"]
    assert list(properties) == list(FIELDS) == [field.name for field in dataclasses.fields(SamplingParams)]
    for name, schema in properties.items():
        assert schema["description"].endswith("."), name
        assert schema["allowed"] == allowed(FIELDS[name]) != "", name


def test_stop_ids_outside_the_vocabulary() -> None:
    """Only the model can tell: refused with both numbers (fault 26)."""
    validate_for(SamplingParams(stop_token_ids=[99]), vocab_size=100)
    with pytest.raises(RequestError) as caught:
        validate_for(SamplingParams(stop_token_ids=[5, 100]), vocab_size=100)
    assert str(caught.value) == "stop_token_ids holds 100: must be below the vocabulary's size, which is 100"
    assert caught.value.field == "stop_token_ids"

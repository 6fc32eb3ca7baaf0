"""A model's generation_config.json as sampling defaults: what counts, what is ignored, what is warned of."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.core.default_sampling import default_params, describe_defaults, read_defaults
from octavo.core.sampling_params import SamplingParams

FILE = "model/generation_config.json"


def test_what_counts() -> None:
    """Six entries, the last under our name; others, and whether transformers would sample, do not."""
    file = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "do_sample": False,
        "eos_token_id": [1, 2],
        "num_beams": 4,
        "length_penalty": 2.0,
    }
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05, "max_tokens": 2048}
    assert read_defaults(file, file=FILE) == expected
    assert read_defaults(file | {"do_sample": True}, file=FILE) == expected


def test_what_is_absent_null_or_ours_already_is_no_default() -> None:
    """Then our own defaults are in force."""
    assert read_defaults({}, file=FILE) == {}
    assert read_defaults({"temperature": None, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1, "max_new_tokens": 16}, file=FILE) == {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "0.6", "temperature = '0.6'"),
        ("temperature", -1, "temperature = -1"),
        ("temperature", float("nan"), "temperature = nan"),
        ("temperature", True, "temperature = True"),
        ("top_p", 0, "top_p = 0"),
        ("top_k", 2.5, "top_k = 2.5"),
        ("min_p", [0.1], "min_p = [0.1]"),
        ("repetition_penalty", 0.0, "repetition_penalty = 0.0"),
        ("max_new_tokens", 0, "max_new_tokens = 0"),
        ("max_new_tokens", {"a": 1}, "max_new_tokens = {'a': 1}"),
    ],
)
def test_a_bad_value_is_warned_of_and_left_out(name: str, value: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """File, entry and value are named, the others still count."""
    with caplog.at_level(logging.WARNING, logger="octavo"):
        found = read_defaults({"top_k": 7, "temperature": 0.5, name: value}, file=FILE)
    assert found == {field: good for field, good in (("temperature", 0.5), ("top_k", 7)) if field != name}
    (record,) = caplog.records
    assert record.getMessage().startswith(FILE) and words in record.getMessage()


def test_the_line_at_start() -> None:
    """Which defaults are in force and where from."""
    said = describe_defaults({"temperature": 0.6, "max_tokens": 2048}, file=FILE, used=True)
    assert "temperature = 0.6, max_tokens = 2048" in said and FILE in said
    assert "Octavo's own" in describe_defaults({}, file=FILE, used=True) and FILE in describe_defaults({}, file=FILE, used=True)
    assert "generation_config" in describe_defaults({}, file=FILE, used=False)


def test_a_default_never_asks_for_more_than_the_context_holds() -> None:
    """`max_new_tokens` of the file, as far as the context goes; a call's own `max_tokens` where the file is silent."""
    long = {"max_tokens": 100, "top_k": 5}
    assert default_params(long, prompt_len=28, max_model_len=128, max_tokens=16) == SamplingParams(top_k=5, max_tokens=100)
    assert default_params(long, prompt_len=29, max_model_len=128, max_tokens=16) == SamplingParams(top_k=5, max_tokens=None)
    assert default_params({}, prompt_len=29, max_model_len=128, max_tokens=16) == SamplingParams()
    assert default_params({}, prompt_len=29, max_model_len=128, max_tokens=None) == SamplingParams(max_tokens=None)

"""`LLM.beam_search`: what it takes and refuses, and what is in its answers."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.beam_search_params import FIELDS
from octavo.core.errors import RequestError
from octavo.core.parameters import allowed
from tests.models import PROMPTS, reference_beams

BEAMS = BeamSearchParams(3, 8, ignore_eos=True)


def ids(prompt: tuple[int, ...]) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt)}


def test_answers_come_in_order_from_the_best(llm: LLM) -> None:
    """One RequestOutput for each prompt, in it one output for each beam: ids, text, both scores."""
    outputs = llm.beam_search([ids(prompt) for prompt in PROMPTS], BEAMS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [list(prompt) for prompt in PROMPTS]
    folder, tokenizer = llm.built.loaded.source.path, llm.built.loaded.tokenizer
    assert tokenizer is not None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference_beams(folder, prompt, BEAMS)
        assert [one.token_ids for one in output.outputs] == [tokens for tokens, _ in expected]
        assert [one.score for one in output.outputs] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert all(one.text == tokenizer.decode(one.token_ids) for one in output.outputs)
        assert output.times is not None and output.times.first_token is not None


def test_one_prompt_as_text_and_params_for_each(llm: LLM) -> None:
    """As `generate` takes them."""
    (alone,) = llm.beam_search("Hello", BEAMS, use_tqdm=False)
    two, three = llm.beam_search(["Hello", "Hello"], [BeamSearchParams(2, 8, ignore_eos=True), BEAMS], use_tqdm=False)
    assert (alone.prompt, len(two.outputs)) == ("Hello", 2)
    assert [one.token_ids for one in three.outputs] == [one.token_ids for one in alone.outputs]


def test_one_beam_is_greedy(llm: LLM) -> None:
    """Token for token, also where it ends."""
    stop = PROMPTS[1]
    for penalty in (0.0, 3.0):
        params = BeamSearchParams(1, 12, penalty, stop_token_ids=list(range(0, 384, 3)))
        greedy = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=list(range(0, 384, 3)))
        (found,), (expected,) = llm.beam_search(ids(stop), params, use_tqdm=False), llm.generate(ids(stop), greedy, use_tqdm=False)
        (beam,), (sample,) = found.outputs, expected.outputs
        assert (beam.token_ids, beam.text, beam.finish_reason) == (sample.token_ids, sample.text, sample.finish_reason)
        assert beam.stop_reason == sample.stop_reason


@pytest.mark.parametrize(
    ("params", "field", "complaint"),
    [
        (SamplingParams(), "params", "params must be BeamSearchParams, or a list of one for each prompt, not SamplingParams"),
        (None, "params", "not NoneType"),
        ([BEAMS] * 2, "params", "1 prompts but 2 params: give one for all, or one for each"),
        (BeamSearchParams(9, 8), "beam_width", "the request needs 9 seats, max_num_seqs is 8"),
        (BeamSearchParams(2, 1000), "max_tokens", r"exceed max_model_len 128: ask for at most 1\d\d"),
        (BeamSearchParams(2, 8, stop_token_ids=[9999]), "stop_token_ids", "stop_token_ids holds 9999: must be below"),
    ],
)
def test_what_cannot_be_served_is_refused(llm: LLM, params: Any, field: str, complaint: str) -> None:
    """By name, and nothing runs."""
    with pytest.raises(RequestError, match=complaint) as refused:
        llm.beam_search("Hello", params, use_tqdm=False)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 17),
        ("beam_width", True),
        ("beam_width", 2.0),
        ("max_tokens", 0),
        ("length_penalty", float("nan")),
        ("length_penalty", 21.0),
        ("length_penalty", "1"),
        ("early_stopping", "always"),
        ("early_stopping", None),
        ("early_stopping", 1),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("timeout_s", 0.0),
        ("cache_salt", 7),
    ],
)
def test_bad_params_name_the_field_and_what_it_may_be(field: str, value: Any) -> None:
    """Nothing is coerced (fault 27)."""
    with pytest.raises(RequestError) as refused:
        BeamSearchParams(**{"beam_width": 2, field: value})
    assert refused.value.field == field
    assert str(refused.value).endswith(f": must be {allowed(FIELDS[field])}")
    assert str(refused.value).startswith((f"{field} = ", f"{field}[0] = "))


def test_unknown_and_missing_params() -> None:
    """A typo names its neighbour; there is no width that would suit everybody."""
    with pytest.raises(RequestError, match=r"unknown beam search parameter beam_widht: did you mean beam_width\?"):
        BeamSearchParams(beam_width=2, beam_widht=3)
    with pytest.raises(RequestError) as refused:
        BeamSearchParams()  # type: ignore[call-arg]
    assert refused.value.field == "beam_width"


def test_params_are_values() -> None:
    """Equal by content, hashable, lists taken as tuples; short penalties at great lengths do not overflow."""
    assert BeamSearchParams(2, stop_token_ids=[1]) == BeamSearchParams(2, stop_token_ids=(1,))
    assert len({BeamSearchParams(2), BeamSearchParams(2), BeamSearchParams(3)}) == 2
    assert BeamSearchParams(2, length_penalty=-20.0).score(-1.0, 2**31) < -1e100
    assert BeamSearchParams(2).score(-3.0, 0) == -3.0

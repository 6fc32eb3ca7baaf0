"""Structured outputs through the whole engine: what ended by its grammar follows it, beside all else that a request may ask for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.core.errors import RequestError
from octavo.core.outputs import CompletionOutput
from tests.llm.conftest import is_empty
from tests.models import tiny
from tests.tensor_rig import TensorRig, make_kv

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None, True]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
HOT = {"temperature": 4.0, "max_tokens": 100}


def follows(answer: CompletionOutput) -> bool:
    """A person in full."""
    jsonschema.validate(json.loads(answer.text), PERSON, cls=jsonschema.Draft202012Validator)
    return (answer.finish_reason, answer.stop_reason, answer.error) == ("stop", None, None)


def only(llm: LLM, prompt: Any = "Who?", **params: Any) -> CompletionOutput:
    """The one output of a request."""
    settings = {"temperature": 0, "max_tokens": 60} | params
    if isinstance(settings.get("structured_outputs"), dict):
        settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
    (output,) = llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)
    (answer,) = output.outputs
    return answer


def seeds(llm: LLM, count: int, **params: Any) -> list[CompletionOutput]:
    """The same request with so many seeds, batched."""
    wanted = StructuredOutputsParams(**params.pop("structured_outputs"))
    each = [SamplingParams(seed=seed, structured_outputs=wanted, **params) for seed in range(count)]
    return [output.outputs[0] for output in llm.generate(["Who?"] * count, each, use_tqdm=False)]


@pytest.fixture(scope="module")
def eos_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Its last id ends outputs, and the byte 0xE2 is a special token: no text holds a euro sign."""
    folder = tmp_path_factory.mktemp("eos") / "model"
    shutil.copytree(tiny("llama_gqa"), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 383}))
    description = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = ((description["model"]["vocab"]["â"], "â"), (383, next(t for t, i in description["model"]["vocab"].items() if i == 383)))
    description["added_tokens"] = [{"id": token_id, "content": content, **flags} for token_id, content in added]
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return LLM(model=folder, device="cpu", dtype="float32", debug=True, max_model_len=128, num_kv_slots=1024, max_num_seqs=8)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 8.0])
def test_what_a_random_model_says_is_valid(llm: LLM, temperature: float) -> None:
    """Left alone it writes noise; with a grammar every output is a person, whole when it ends, with the reason stop."""
    made = seeds(llm, 4, temperature=temperature, max_tokens=100, structured_outputs={"json": PERSON, "disable_any_whitespace": True})
    assert all(follows(answer) for answer in made)
    assert len({answer.text for answer in made}) > (temperature > 0)
    assert not only(llm).text.startswith("{")


def test_samples_of_one_request_part_ways(llm: LLM) -> None:
    """n > 1: each output follows the grammar by itself, and they differ."""
    (output,) = llm.generate("Who?", SamplingParams(n=4, seed=3, structured_outputs=JSON, **HOT), use_tqdm=False)
    assert all(follows(answer) for answer in output.outputs)
    assert len({answer.text for answer in output.outputs}) > 1


def test_a_stream_joins_to_the_text(llm: LLM) -> None:
    """The last piece brings the reason, and nothing is left behind."""
    params = SamplingParams(seed=1, structured_outputs=JSON, **HOT)
    (whole,) = llm.generate("Who?", params, use_tqdm=False)
    pieces = list(llm.stream("Who?", params))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert [piece.outputs[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]


@pytest.mark.slow
def test_neighbours_and_preemption_change_nothing(llm: LLM, new_llm: Callable[..., LLM]) -> None:
    """Alone, beside free requests, and in a pool that runs dry all the time: the same tokens."""
    small = new_llm(num_kv_slots=96, max_model_len=96)
    free = SamplingParams(temperature=0, max_tokens=40)
    params = [SamplingParams(seed=seed, **HOT | {"max_tokens": 80}, structured_outputs=JSON if seed % 2 else None) for seed in range(3)]
    params[0] = free
    prompts = ["one", "two two", "three"]
    batched = llm.generate(prompts, params, use_tqdm=False)
    tight = small.generate(prompts, params, use_tqdm=False)
    assert sum(output.num_preemptions for output in tight) > 0
    assert [output.outputs for output in tight] == [output.outputs for output in batched]
    alone = [llm.generate(prompt, one, use_tqdm=False)[0].outputs for prompt, one in zip(prompts, params, strict=True)]
    assert alone == [output.outputs for output in batched]
    assert is_empty(small)


def test_max_tokens_in_the_middle(llm: LLM) -> None:
    """The reason is length, and the text a beginning of the longer one; where the last token completes it, the reason is stop."""
    whole = only(llm, structured_outputs=JSON)
    cut = only(llm, structured_outputs=JSON, max_tokens=len(whole.token_ids) - 1)
    assert cut.finish_reason == "length" and whole.text.startswith(cut.text) and len(cut.text) < len(whole.text)
    exact = only(llm, structured_outputs=JSON, max_tokens=len(whole.token_ids))
    assert (exact.finish_reason, exact.text) == ("stop", whole.text)


def test_an_output_ends_with_its_grammar_whatever_min_tokens_say(eos_llm: LLM) -> None:
    """Nothing could follow: it ends, without an end token, with `ignore_eos` too."""
    for params in ({}, {"ignore_eos": True}, {"min_tokens": 40}):
        answer = only(eos_llm, structured_outputs={"regex": "abcd"}, **params)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abcd", "stop", None)
        assert 383 not in answer.token_ids


@pytest.mark.slow
def test_min_tokens_and_ignore_eos_where_more_may_follow(eos_llm: LLM) -> None:
    """The end waits for `min_tokens`; with `ignore_eos` it never comes, and the grammar's own end is the only one."""
    settings = {"temperature": 20.0, "max_tokens": 60, "structured_outputs": {"regex": "[ab]{1,50}"}}
    free, late, endless = (seeds(eos_llm, 6, **settings, **more) for more in ({}, {"min_tokens": 30}, {"ignore_eos": True}))
    for answer in free + late + endless:
        assert re.fullmatch("[ab]{1,50}", answer.text) and answer.finish_reason == "stop"
    assert all((answer.token_ids[-1] == 383) == (len(answer.text) < 50) for answer in free)
    assert min(len(answer.text) for answer in free) < 30
    assert all(len(answer.text) >= 30 for answer in late)
    assert all(len(answer.text) == 50 for answer in endless)


def test_a_stop_token_of_the_users_ends_it_where_it_may_end(eos_llm: LLM) -> None:
    """And nowhere else, though it be no end token of the model's."""
    settings = {"temperature": 50.0, "ignore_eos": True, "stop_token_ids": [7], "structured_outputs": {"regex": "(ab){1,20}"}}
    answers = seeds(eos_llm, 8, max_tokens=60, **settings)
    assert all(re.fullmatch("(ab)+", answer.text) and answer.finish_reason == "stop" for answer in answers)
    assert {answer.stop_reason for answer in answers} >= {7}


def test_what_the_vocabulary_cannot_go_on_with(eos_llm: LLM) -> None:
    """Complete as it is, the output ends; if not, its request fails, and says so."""
    for params in ({}, {"ignore_eos": True}, {"min_tokens": 30}):
        done = only(eos_llm, structured_outputs={"regex": "ab(€)?"}, **params)
        assert (done.text, done.finish_reason, done.error) == ("ab", "stop", None)
    failed = only(eos_llm, structured_outputs={"regex": "ab€"})
    assert failed.finish_reason == "error" and failed.error is not None and "no token of this model's vocabulary goes on" in failed.error
    assert failed.text == "ab" and is_empty(eos_llm)


def test_a_sample_that_ends_before_its_siblings(eos_llm: LLM) -> None:
    """Of n outputs each ends for itself, at the same step or at others, streamed or not."""
    params = SamplingParams(
        n=3, temperature=30.0, seed=5, max_tokens=60, structured_outputs=StructuredOutputsParams(regex="a{3}|b{20}|cd|d(€)?|e{7}")
    )
    (output,) = eos_llm.generate("x", params, use_tqdm=False)
    texts = [answer.text for answer in output.outputs]
    assert all(re.fullmatch("a{3}|b{20}|cd|d(€)?|e{7}", text) for text in texts) and len({len(text) for text in texts}) > 1
    streamed = [""] * 3
    for piece in eos_llm.stream("x", params):
        for answer in piece.outputs:
            streamed[answer.index] += answer.text
    assert streamed == texts and is_empty(eos_llm)


def test_stop_strings_still_cut(llm: LLM) -> None:
    """A stop string ends a structured output as any other."""
    answer = only(llm, structured_outputs=JSON, stop=['"age"'])
    assert answer.finish_reason == "stop" and answer.stop_reason == '"age"'
    assert answer.text.endswith(",") and '"age"' not in answer.text


def test_held_back_text_comes_out_at_the_end(llm: LLM) -> None:
    """What might have begun a stop string is let go when the grammar ends the output (fault 30)."""
    assert only(llm, structured_outputs={"regex": "abc"}, stop=["bcd"]).text == "abc"


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """Raw, as without a grammar: the likeliest token is one that the grammar did not allow."""
    free = only(llm, logprobs=2, max_tokens=1)
    held = only(llm, logprobs=2, structured_outputs={"choice": ("{",)})
    assert free.logprobs is not None and held.logprobs is not None
    (first,), (kept,) = free.logprobs, held.logprobs
    assert free.token_ids[0] not in held.token_ids
    for token_id, entry in first.items():
        assert kept[token_id].logprob == pytest.approx(entry.logprob, abs=1e-5)
    assert kept[held.token_ids[0]].rank > 1


@pytest.mark.parametrize(
    ("structured", "more", "words"),
    [
        ({"regex": "a(?=b)"}, {}, "look-around"),
        ({"json": {"uniqueItems": True}}, {}, "uniqueItems"),
        ({"regex": "€"}, {}, "no token of this model's vocabulary"),
    ],
)
def test_refused_at_submit(eos_llm: LLM, structured: dict[str, Any], more: dict[str, Any], words: str) -> None:
    """With the field, and nothing is left in the engine."""
    with pytest.raises(RequestError, match=words) as error:
        only(eos_llm, structured_outputs=structured, **more)
    assert error.value.field == "structured_outputs" and is_empty(eos_llm)


def test_an_engine_without_a_tokenizer_refuses() -> None:
    """It has no text that could follow anything."""
    with pytest.raises(RequestError, match="structured_outputs need a tokenizer"):
        TensorRig(make_kv("paged-4", 64)).add([1, 2], 4, structured_outputs=JSON)


def test_a_token_that_the_grammar_refuses_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot happen while masks are applied; if it does, the request fails and its neighbour goes on."""
    monkeypatch.setattr("octavo.core.torch_runner.forbid", lambda logits, masks: None)
    params = [SamplingParams(temperature=0, max_tokens=8, structured_outputs=JSON), SamplingParams(temperature=0, max_tokens=8)]
    held, free = (output.outputs[0] for output in llm.generate(["Who?", "Who?"], params, use_tqdm=False))
    assert held.finish_reason == "error" and held.error is not None and "structured_outputs" in held.error
    assert free.finish_reason == "length" and len(free.token_ids) == 8


def test_masks_that_do_not_come(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded: those requests fail, the others go on, and the next one has a new thread."""
    import threading

    from octavo.core.grammar import masks

    hang = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(masks, "_masks_of", lambda requests, rows: hang.wait(60))
        patch.setattr(masks.PendingMasks.wait, "__defaults__", (0.2,))
        params = [SamplingParams(temperature=0, max_tokens=8, structured_outputs=JSON), SamplingParams(temperature=0, max_tokens=8)]
        held, free = (output.outputs[0] for output in llm.generate(["Who?", "Who?"], params, use_tqdm=False))
    hang.set()
    assert held.finish_reason == "error" and held.error == masks.LATE
    assert len(free.token_ids) == 8
    assert follows(only(llm, structured_outputs=JSON))

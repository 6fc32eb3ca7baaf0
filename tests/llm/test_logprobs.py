"""Log probabilities as a user gets them: with text, in pieces, as JSON, beside everything else that a request may ask for."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import RequestError
from octavo.core.outputs import CompletionOutput, RequestOutput

HOT = {"temperature": 4.0, "max_tokens": 24}
PROMPTS = ["one", "two two", "three three three", "4", "five five five five five", "6 6"]
ASKS: list[dict[str, Any]] = [{"logprobs": 0}, {"logprobs": 5}, {"prompt_logprobs": 2}, {"logprobs": 3, "prompt_logprobs": 0}]


def one(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def bare(outputs: list[CompletionOutput]) -> list[Any]:
    return [(output.index, output.text, output.token_ids, output.finish_reason, output.stop_reason) for output in outputs]


@pytest.mark.parametrize("asks", ASKS, ids=str)
def test_asking_changes_no_text(llm: LLM, asks: dict[str, Any]) -> None:
    """Greedy, sampled, filtered and several samples, each as without asking, alone and beside others who do not ask (fault 36)."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 24},
        {"seed": 1, **HOT},
        {"seed": 2, "top_k": 9, **HOT},
        {"seed": 3, "top_p": 0.8, **HOT},
        {"seed": 4, "n": 3, **HOT},
        {"temperature": 0, "max_tokens": 24, "stop": ["w2"], "min_tokens": 3},
    ]
    plain = llm.generate(PROMPTS, [SamplingParams(**each) for each in settings], use_tqdm=False)
    asking = llm.generate(PROMPTS, [SamplingParams(**each, **asks) for each in settings], use_tqdm=False)
    mixed = llm.generate(PROMPTS, [SamplingParams(**each, **(asks if i % 2 else {})) for i, each in enumerate(settings)], use_tqdm=False)
    for answers in (asking, mixed):
        assert [bare(answer.outputs) for answer in answers] == [bare(answer.outputs) for answer in plain]


@pytest.mark.parametrize("n", [1, 3])
def test_pieces_joined_are_the_whole(llm: LLM, n: int) -> None:
    """Each piece brings those of its own tokens and the sum so far; the prompt's come once, with the first piece."""
    params = SamplingParams(n=n, seed=5, logprobs=2, prompt_logprobs=1, **HOT)
    whole = llm.generate(PROMPTS[4], params, use_tqdm=False)[0]
    pieces = list(llm.stream(PROMPTS[4], params))
    assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert pieces[0].prompt_logprobs == whole.prompt_logprobs
    for answer in whole.outputs:
        mine = [output for piece in pieces for output in piece.outputs if output.index == answer.index]
        assert all(output.logprobs is not None and len(output.logprobs) == len(output.token_ids) for output in mine)
        assert [entry for output in mine for entry in output.logprobs or ()] == answer.logprobs
        assert mine[-1].cumulative_logprob == answer.cumulative_logprob
        assert answer.cumulative_logprob == pytest.approx(
            sum(entry[token].logprob for entry, token in zip(answer.logprobs or (), answer.token_ids, strict=True))
        )


def test_every_entry_says_what_it_is_of(llm: LLM) -> None:
    """The token first, then as many likeliest ones as were asked for, each with its text; ranks count from 1."""
    output = one(llm, "Hello", temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    (answer,) = output.outputs
    tokenizer = llm.built.loaded.tokenizer
    assert tokenizer is not None and answer.logprobs is not None and output.prompt_logprobs is not None
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert [value.rank for value in entry.values()] == [1, 2, 3]  # greedy: the token is the likeliest
        assert next(iter(entry)) == token
        assert [value.decoded_token for value in entry.values()] == [tokenizer.decode_token(other) for other in entry]
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids) == 5
    for token, entry_or_none in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry_or_none is not None and next(iter(entry_or_none)) == token
        assert len(entry_or_none) == (2 if entry_or_none[token].rank <= 2 else 3)
    assert one(llm, {"prompt_token_ids": [7]}, max_tokens=1, prompt_logprobs=1).prompt_logprobs == [None]


def test_a_stop_string_leaves_tokens_and_their_logprobs(llm: LLM) -> None:
    """The text is cut; the tokens that were sampled stay, with one entry each, in a stream too."""
    whole = one(llm, "Hello", temperature=0, max_tokens=24, logprobs=1).outputs[0]
    stop = whole.text[len(whole.text) // 2 :][:5]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, stop=stop)
    (answer,) = llm.generate("Hello", params, use_tqdm=False)[0].outputs
    count = len(answer.token_ids)
    assert answer.finish_reason == "stop" and count < 24 and answer.text == whole.text[: whole.text.index(stop)]
    assert answer.logprobs == (whole.logprobs or [])[:count]
    streamed = [entry for piece in llm.stream("Hello", params) for entry in piece.outputs[0].logprobs or ()]
    assert streamed == answer.logprobs


def test_everything_can_be_said_in_json(llm: LLM) -> None:
    """No infinity and no NaN, even of tokens that a model all but rules out (fault 56)."""
    output = one(llm, "Hello", seed=3, temperature=50.0, max_tokens=24, logprobs=384, prompt_logprobs=384)
    assert len((output.outputs[0].logprobs or [{}])[0]) == 384
    again = json.loads(json.dumps(asdict(output), allow_nan=False))
    assert again["outputs"][0]["cumulative_logprob"] == output.outputs[0].cumulative_logprob
    assert (
        min(entry[token].logprob for entry, token in zip(output.outputs[0].logprobs or (), output.outputs[0].token_ids, strict=True)) < -9
    )


def test_best_of_is_the_best_of_the_same_samples(llm: LLM) -> None:
    """The n of greatest summed log probability, numbered from 0, as n = best_of would give them."""
    samples = one(llm, "one", n=5, seed=7, logprobs=0, **HOT).outputs
    best = sorted(samples, key=lambda output: -(output.cumulative_logprob or 0))[:2]
    found = one(llm, "one", n=2, best_of=5, seed=7, logprobs=0, **HOT).outputs
    assert [(output.index, output.text, output.cumulative_logprob) for output in found] == [
        (number, output.text, output.cumulative_logprob) for number, output in enumerate(best)
    ]
    assert [output.logprobs for output in found] == [output.logprobs for output in best]
    silent = one(llm, "one", n=2, best_of=5, seed=7, **HOT).outputs
    assert [output.text for output in silent] == [output.text for output in best]
    assert all(output.logprobs is None and output.cumulative_logprob is not None for output in silent)


def test_more_than_there_are_tokens_is_refused(llm: LLM) -> None:
    """With both numbers, by the parameter's name."""
    for field in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{field} = 385: the vocabulary has 384 tokens") as caught:
            one(llm, "Hello", **{field: 385})
        assert caught.value.field == field


def test_a_stream_that_is_left_early_has_what_is_known(llm: LLM) -> None:
    """Aborted or timed out, pieces carry no more and no less than their tokens' log probabilities."""
    stream = llm.stream("Hello", SamplingParams(temperature=0, max_tokens=24, logprobs=1, prompt_logprobs=1))
    first = next(stream)
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 5
    llm.engine.abort(first.request_id)
    last = [piece.outputs[0] for piece in stream][-1]
    assert (last.finish_reason, last.token_ids, last.logprobs) == ("abort", [], [])

"""POST /v1/completions: every option, whole and in pieces; what an engine without a server answers is what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from octavo import LLM, SamplingParams
from tests.server import validity
from tests.server.conftest import Script, events
from tests.server.test_bodies import refusal

TEXT = "/v1/completions"
GREEDY: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "max_tokens": 10}


def ask(http: httpx2.Client, **fields: Any) -> Any:
    """A valid whole answer."""
    answer = http.post(TEXT, json=fields)
    assert answer.status_code == 200, answer.text
    return validity.completion(answer.json())


def stream(http: httpx2.Client, **fields: Any) -> list[Any]:
    """The valid chunks of a streamed one."""
    answer = http.post(TEXT, json={**fields, "stream": True})
    assert answer.status_code == 200, answer.text
    return [validity.completion_chunk(chunk) for chunk in events(answer)]


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """What the chunks add up to, in the order of their indices; each index ends once, and nothing follows."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "logprobs": None, "ids": [], "reason": None})
            assert one["reason"] is None
            one["text"] += choice["text"]
            one["ids"] += choice.get("token_ids", [])
            one["reason"] = choice["finish_reason"]
            if choice["logprobs"]:
                old = one["logprobs"] or {name: value and [] for name, value in choice["logprobs"].items()}
                one["logprobs"] = {name: value and old[name] + value for name, value in choice["logprobs"].items()}
    assert all(one["reason"] for one in found.values()) and sorted(found) == list(range(len(found)))
    return [found[index] for index in range(len(found))]


def offline_answer(llm: LLM, prompt: Any, **params: Any) -> Any:
    (output,) = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return output


def texts(body: Any) -> list[str]:
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [choice["text"] for choice in body["choices"]]


def test_the_answer_is_the_engines(http: httpx2.Client, offline: LLM) -> None:
    """Text, usage, reason, whole and streamed; 16 tokens where nothing is said (fault 25)."""
    expected = offline_answer(offline, "Hello", temperature=0, max_tokens=10).outputs[0]
    body = ask(http, **GREEDY)
    assert texts(body) == [expected.text] and body["choices"][0]["finish_reason"] == "length"
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert {**body["usage"], "prompt_tokens_details": None} == {
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "total_tokens": 15,
        "prompt_tokens_details": None,
    }
    assert joined(stream(http, **GREEDY))[0]["text"] == expected.text
    assert ask(http, prompt="Hello")["usage"]["completion_tokens"] == 16


PROMPTS: list[Any] = [["Hello", "é and on"], [[1, 2, 3], [4, 5, 6, 7]], [9, 8, 7], [[5]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_many_prompts_and_ids(http: httpx2.Client, offline: LLM, prompt: Any, n: int) -> None:
    """Choices in the order of prompts, then samples; streamed, under the same indices, each ended once (faults 40, 41)."""
    many = [prompt] if isinstance(prompt[0], int) else prompt
    params: dict[str, Any] = {"seed": 3, "temperature": 1.3, "max_tokens": 6, "n": n}
    outputs = [offline_answer(offline, one if isinstance(one, str) else {"prompt_token_ids": one}, **params) for one in many]
    expected = [sample.text for output in outputs for sample in output.outputs]
    body = ask(http, prompt=prompt, **params)
    assert texts(body) == expected and len(set(expected)) == len(expected)
    assert body["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    *chunks, last = stream(http, prompt=prompt, stream_options={"include_usage": True}, **params)
    assert [one["text"] for one in joined(chunks)] == expected
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == body["usage"][name]


def test_greedy_n_of_many_prompts(http: httpx2.Client) -> None:
    """Copies stand beside their prompt."""
    a, b = texts(ask(http, **GREEDY | {"prompt": ["one", "two"]}))
    assert texts(ask(http, **GREEDY | {"prompt": ["one", "two"]}, n=2)) == [a, a, b, b]
    assert [one["text"] for one in joined(stream(http, **GREEDY | {"prompt": ["one", "two"]}, n=2))] == [a, a, b, b]
    assert texts(ask(http, **GREEDY, n=2, best_of=3)) == texts(ask(http, **GREEDY)) * 2


def test_best_of_gives_the_likeliest(http: httpx2.Client, offline: LLM) -> None:
    """The engine's."""
    params: dict[str, Any] = {"seed": 3, "temperature": 1.5, "max_tokens": 6, "n": 2, "best_of": 5}
    assert texts(ask(http, prompt="Hello", **params)) == [one.text for one in offline_answer(offline, "Hello", **params).outputs]


@pytest.mark.parametrize("count", [0, 2])
def test_logprobs_are_the_engines(http: httpx2.Client, offline: LLM, count: int) -> None:
    """Values, tokens and offsets, whole and streamed."""
    expected = offline_answer(offline, "Hello", temperature=0, max_tokens=10, logprobs=count).outputs[0]
    table = ask(http, **GREEDY, logprobs=count)["choices"][0]["logprobs"]
    own = [entry[token].logprob for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert table["token_logprobs"] == pytest.approx(own, abs=1e-5)
    assert (table["top_logprobs"] is None) == (count == 0)
    for entry, named in zip(expected.logprobs, table["top_logprobs"] or [], strict=count > 0):
        assert sorted(named.values()) == pytest.approx(sorted({value.logprob for value in entry.values()}), abs=1e-5)
    assert joined(stream(http, **GREEDY, logprobs=count))[0]["logprobs"] == table


def test_tokens_within_a_character(http: httpx2.Client, script: Script) -> None:
    """Written as bytes; their offset is the character's, and whole tokens are found in the text at theirs."""
    text = "aé👍z"
    script(text, text)
    for table in (
        ask(http, prompt="x", logprobs=1)["choices"][0]["logprobs"],
        joined(stream(http, prompt="x", logprobs=1))[0]["logprobs"],
    ):
        assert table["tokens"][:-1] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "é👍".encode()), "z"]
        assert table["text_offset"][:-1] == [0, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("prompt", ["Héllo", [72, 195, 40], [["a"], [5]]], ids=str)
def test_echo(http: httpx2.Client, prompt: Any) -> None:
    """The prompt's text stands before its continuation, once."""
    if isinstance(prompt[0], list):
        prompt = [[7, 8], [9]]
    many = prompt if isinstance(prompt[0], list) else [prompt]
    shown = [one if isinstance(one, str) else http.post("/detokenize", json={"tokens": one}).json()["prompt"] for one in many]
    plain = texts(ask(http, **GREEDY | {"prompt": prompt}, n=2))
    expected = [shown[number // 2] + text for number, text in enumerate(plain)]
    assert texts(ask(http, **GREEDY | {"prompt": prompt}, n=2, echo=True)) == expected
    assert [one["text"] for one in joined(stream(http, **GREEDY | {"prompt": prompt}, n=2, echo=True))] == expected


def test_echo_with_logprobs_scores_the_prompt(http: httpx2.Client, offline: LLM) -> None:
    """The prompt's log probabilities, null for its first token, then the output's; streamed, the same."""
    output = offline_answer(offline, "Hello", temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1)
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    (choice,) = ask(http, prompt="Hello", temperature=0, max_tokens=4, logprobs=1, echo=True)["choices"]
    table = choice["logprobs"]
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    assert table["token_logprobs"][1:] == pytest.approx([e[t].logprob for t, e in zip(ids[1:], entries, strict=True)], abs=1e-5)
    assert table["tokens"][:5] == list("Hello") and table["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
    assert joined(stream(http, prompt="Hello", temperature=0, max_tokens=4, logprobs=1, echo=True))[0]["logprobs"] == table


@pytest.mark.parametrize("streamed", [False, True])
def test_no_new_token_at_all(http: httpx2.Client, offline: LLM, streamed: bool) -> None:
    """max_tokens = 0 with echo: the prompt comes back, scored if asked, and nothing is counted as made."""
    asked: dict[str, Any] = {"prompt": ["Hello", "you"], "max_tokens": 0, "echo": True, "logprobs": 0}
    if streamed:
        *chunks, last = stream(http, **asked, stream_options={"include_usage": True})
        choices, used = joined(chunks), last["usage"]
    else:
        body = ask(http, **asked)
        choices, used = body["choices"], body["usage"]
        assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert [choice["text"] for choice in choices] == ["Hello", "you"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (8, 0)
    expected = offline_answer(offline, "Hello", max_tokens=1, prompt_logprobs=0)
    own = [entry[token].logprob for token, entry in zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True)]
    assert choices[0]["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=1e-5) and len(choices[0]["logprobs"]["tokens"]) == 5


def test_truncated_prompts(http: httpx2.Client) -> None:
    """What was cut is not echoed, counted or listed."""
    asked: dict[str, Any] = {"prompt": "Hello", "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 2, "return_token_ids": True}
    body = ask(http, **asked)
    assert body["choices"][0]["text"].startswith("llo") and body["usage"]["prompt_tokens"] == 3
    first, *_ = stream(http, **asked)
    ids = http.post("/tokenize", json={"prompt": "llo"}).json()["tokens"]
    assert body["choices"][0]["prompt_token_ids"] == first["choices"][0]["prompt_token_ids"] == ids
    assert first["choices"][0]["text"].startswith("llo")


def test_prompt_logprobs_and_ids(http: httpx2.Client) -> None:
    """By prompt; streamed, in the first chunk of each index."""
    asked: dict[str, Any] = {**GREEDY, "prompt": ["Hello", "you"], "prompt_logprobs": 1, "return_token_ids": True}
    body = ask(http, **asked)
    firsts: dict[int, Any] = {}
    chunks = stream(http, **asked)
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] in firsts:
                assert "prompt_logprobs" not in choice and "prompt_token_ids" not in choice
            firsts.setdefault(choice["index"], choice)
    for choice in body["choices"]:
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) and choice["prompt_logprobs"][0] is None
        assert firsts[choice["index"]]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert firsts[choice["index"]]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [one["ids"] for one in joined(chunks)] == [choice["token_ids"] for choice in body["choices"]]


def test_stops_and_formats(http: httpx2.Client, script: Script) -> None:
    """As in chat."""
    script(*["one, two"] * 2)
    (choice,) = ask(http, prompt="x", stop=[", t"])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", ", t")
    assert joined(stream(http, prompt="x", stop=", t"))[0]["text"] == "one"


def test_structured_outputs(http: httpx2.Client) -> None:
    """response_format and Octavo's own field."""
    schema = {"enum": ["yes", "no"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (text,) = texts(ask(http, prompt="x", temperature=1.5, response_format=form))
    assert json.loads(text) in schema["enum"]
    assert texts(ask(http, prompt="x", structured_outputs={"choice": ["left", "right"]}))[0] in ("left", "right")


def test_requests_of_one_body_fail_together(http: httpx2.Client) -> None:
    """One bad prompt among good ones: 400 that says which, and nothing goes on."""
    for streamed in (False, True):
        error = refusal(http.post(TEXT, json={"prompt": ["a", "", "b"], "max_tokens": 200, "stream": streamed}))
        assert error["param"] == "prompt" and "empty" in error["message"]


def test_the_same_request_id_at_once(http: httpx2.Client) -> None:
    """Prompts of one body have ids of their own; the body's comes back."""
    body = ask(http, prompt=["a", "b"], max_tokens=1, request_id="mine")
    assert body["id"] == "mine"


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_mid_stream_is_an_event(http: httpx2.Client, engine: Any, monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    """One of several prompts fails: the error, then [DONE], and the others are ended (fault 42)."""
    run, begun = engine.run, iter(range(9))

    async def breaking(*args: Any, **about: Any) -> Any:
        number, left = next(begun), 3
        async for piece in run(*args, **about):
            yield piece
            left -= 1
            if number == broken and not left:
                raise ZeroDivisionError("secret")

    monkeypatch.setattr(engine, "run", breaking)
    answer = http.post(TEXT, json={"prompt": ["a", "b"], "max_tokens": 200, "stream": True})
    *chunks, last = events(answer)
    assert answer.status_code == 200 and chunks and last["error"]["type"] == "server_error" and "secret" not in answer.text


def test_the_official_client(client: openai.OpenAI, offline: LLM) -> None:
    """Whole and streamed, one prompt and many."""
    text = offline_answer(offline, "Hello", temperature=0, max_tokens=10).outputs[0].text
    assert client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=10).choices[0].text == text
    pieces = list(client.completions.create(model="tiny", prompt=["Hello", "Hello"], temperature=0, max_tokens=10, stream=True))
    for index in range(2):
        assert "".join(c.text for piece in pieces for c in piece.choices if c.index == index) == text


def test_over_a_real_socket(address: str, offline: LLM) -> None:
    """The official client, as anybody uses it."""
    text = offline_answer(offline, "Hello", temperature=0, max_tokens=10).outputs[0].text
    with openai.OpenAI(api_key="none", base_url=f"{address}/v1", max_retries=0) as client:
        assert client.models.list().data[0].id == client.models.retrieve("tiny").id == "tiny"
        pieces = client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=10, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == text
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-5")


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_too_much_to_follow_is_the_callers(http: httpx2.Client, stream: bool) -> None:
    """It compiles, and grows too large while tokens are taken: 400, or an error event that says so, never a 500."""
    body = {"prompt": "x", "max_tokens": 9, "stream": stream, "structured_outputs": {"regex": "(.*){30}" * 30}}
    answer = http.post("/v1/completions", json=body)
    error = events(answer)[-1]["error"] if answer.status_code == 200 else answer.json()["error"]
    assert (error["code"], error["param"]) == (400, "structured_outputs") and "too many" in error["message"]

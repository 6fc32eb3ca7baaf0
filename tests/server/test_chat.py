"""POST /v1/chat/completions: every option, whole and in pieces; what an engine without a server answers is what comes back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.async_llm import AsyncLLM
from tests.server import validity
from tests.server.conftest import Script, events
from tests.server.test_bodies import CHAT, refusal

HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 12}


def ask(http: httpx2.Client, **fields: Any) -> Any:
    """A valid whole answer."""
    answer = http.post(CHAT, json=fields)
    assert answer.status_code == 200, answer.text
    return validity.chat(answer.json())


def stream(http: httpx2.Client, **fields: Any) -> list[Any]:
    """The valid chunks of a streamed one."""
    answer = http.post(CHAT, json={**fields, "stream": True})
    assert answer.status_code == 200, answer.text
    return [validity.chat_chunk(chunk) for chunk in events(answer)]


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What the chunks add up to, by index: text, log probabilities, ids; each index ends once, and nothing follows."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            new = choice["index"] not in found
            one = found.setdefault(choice["index"], {"text": "", "logprobs": [], "ids": [], "reason": None})
            assert one["reason"] is None
            assert choice["delta"].get("role") == ("assistant" if new else None)
            one["text"] += choice["delta"].get("content") or ""
            one["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            one["ids"] += choice.get("token_ids", [])
            one["reason"] = choice["finish_reason"]
    assert all(one["reason"] for one in found.values())
    return found


def offline_answer(llm: LLM, **params: Any) -> Any:
    (output,) = llm.chat(HELLO, SamplingParams(**params), use_tqdm=False)
    return output


def test_the_answer_is_the_engines(http: httpx2.Client, offline: LLM) -> None:
    """Text, usage, reason, whole and streamed."""
    expected = offline_answer(offline, temperature=0, max_tokens=12)
    body = ask(http, **GREEDY, model="tiny")
    (choice,) = body["choices"]
    assert choice["message"]["content"] == expected.outputs[0].text and choice["finish_reason"] == "length"
    assert body["id"].startswith("chatcmpl-") and (body["object"], body["model"]) == ("chat.completion", "tiny")
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        len(expected.prompt_token_ids),
        12,
        len(expected.prompt_token_ids) + 12,
    )
    assert joined(stream(http, **GREEDY))[0]["text"] == expected.outputs[0].text


def test_absent_max_tokens_is_the_rest_of_the_context(http: httpx2.Client, engine: AsyncLLM) -> None:
    """As OpenAI has it (fault 25)."""
    body = ask(http, messages=HELLO, temperature=0)
    assert body["usage"]["total_tokens"] == engine.built.engine.max_model_len


def test_usage_comes_last_in_a_chunk_of_its_own(http: httpx2.Client) -> None:
    """For who asked: no choices, and null in all other chunks. Otherwise no word of it (fault 40)."""
    whole = ask(http, **GREEDY)["usage"]
    *others, last = stream(http, **GREEDY, stream_options={"include_usage": True})
    assert last["choices"] == [] and others and all(chunk["usage"] is None for chunk in others)
    assert {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        name: whole[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    assert not any("usage" in chunk for chunk in stream(http, **GREEDY))


def test_usage_so_far(http: httpx2.Client) -> None:
    """In every chunk, growing to the last one's."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, **GREEDY, stream_options=options, return_token_ids=True)
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made) and made[-1] == 12 and len(set(made)) > 2
    pairs = zip(chunks, made, strict=True)
    told = [(len(one["token_ids"]), usage) for chunk, usage in pairs for one in chunk["choices"] if one.get("token_ids") is not None]
    assert list(itertools.accumulate(count for count, _ in told)) == [usage for _, usage in told]


def test_n_samples_are_those_of_the_engine(http: httpx2.Client, offline: LLM) -> None:
    """Each index its own text, ended once in a stream (fault 41)."""
    asked = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 8}
    texts = [one.text for one in offline_answer(offline, **asked).outputs]
    assert len(set(texts)) == 3
    body = ask(http, messages=HELLO, **asked)
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == list(enumerate(texts))
    assert body["usage"]["completion_tokens"] == 24
    found = joined(stream(http, messages=HELLO, **asked))
    assert [found[index]["text"] for index in range(3)] == texts


def test_greedy_n_is_made_once_and_given_n_times(http: httpx2.Client, offline: LLM) -> None:
    """All alike, each counted."""
    text = offline_answer(offline, temperature=0, max_tokens=12).outputs[0].text
    body = ask(http, **GREEDY, n=3)
    assert [c["message"]["content"] for c in body["choices"]] == [text] * 3 and [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 36
    *chunks, last = stream(http, **GREEDY, n=3, stream_options={"include_usage": True})
    assert {index: one["text"] for index, one in joined(chunks).items()} == dict.fromkeys(range(3), text)
    assert last["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs_are_the_engines(http: httpx2.Client, offline: LLM, top: int | None) -> None:
    """The same values in the order of their ranks; streamed, the same again."""
    expected = offline_answer(offline, temperature=0, max_tokens=12, logprobs=top or 0).outputs[0]
    asked = {**GREEDY, "logprobs": True, **({} if top is None else {"top_logprobs": top})}
    content = ask(http, **asked)["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for token_id, entry, told in zip(expected.token_ids, expected.logprobs, content, strict=True):
        assert told["logprob"] == pytest.approx(entry[token_id].logprob, abs=1e-5)
        ranked = sorted((value.rank, value.logprob) for value in entry.values())[: top or 0]
        assert [one["logprob"] for one in told["top_logprobs"]] == pytest.approx([value for _, value in ranked], abs=1e-5)
    again = joined(stream(http, **asked))[0]["logprobs"]
    assert [one["token"] for one in again] == [one["token"] for one in content]
    for one, other in zip(again, content, strict=True):  # the prompt comes from the cache now, which may change the last digit
        assert [one["logprob"], *(top["logprob"] for top in one["top_logprobs"])] == pytest.approx(
            [other["logprob"], *(top["logprob"] for top in other["top_logprobs"])], abs=1e-5
        )
    assert "logprobs" in ask(http, **GREEDY)["choices"][0] and ask(http, **GREEDY)["choices"][0]["logprobs"] is None


def test_bytes_of_tokens_make_up_the_text(http: httpx2.Client, script: Script) -> None:
    """A character of several tokens: each has its own bytes, and a text that says so; together they are the text."""
    text = "né 日本 👩‍👩‍👧 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    script(text, text)
    for content in (
        ask(http, messages=HELLO, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"],
        joined(stream(http, messages=HELLO, logprobs=True, top_logprobs=1))[0]["logprobs"],
    ):
        assert bytes(byte for token in content[:-1] for byte in token["bytes"]).decode() == text  # the last one ends it
        assert [token["token"] for token in content[:3]] == ["n", "\\xc3", "\\xa9"]
        assert all("\ufffd" not in token["token"] for token in content)


def test_characters_are_never_broken(http: httpx2.Client, script: Script) -> None:
    """One byte a token: no chunk has half a character, and together they are the text (fault 38)."""
    text = "Grüße, 世界! 👩‍👩‍👧‍👦🏳️‍🌈 \u0000\u200d"
    script(text, text)
    chunks = stream(http, messages=HELLO)
    assert joined(chunks)[0]["text"] == text == ask(http, messages=HELLO)["choices"][0]["message"]["content"]
    assert not any("\ufffd" in (choice["delta"].get("content") or "") for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("stop", "text", "met"),
    [
        ("lo, w", "Hel", "lo, w"),
        (["xyz", "wor", "o"], "Hell", "o"),
        (["world!"], "Hello, world?", 300),  # held back, and out again
        (["d?"], "Hello, worl", "d?"),
    ],
)
def test_stop_strings_over_several_tokens(http: httpx2.Client, script: Script, stop: Any, text: str, met: Any) -> None:
    """Nothing of them leaks, what was held back comes out when it does not match, the one that was met is told (fault 28)."""
    script(*["Hello, world?"] * 3)
    (choice,) = ask(http, messages=HELLO, stop=stop)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", met)
    chunks = stream(http, messages=HELLO, stop=stop)
    assert joined(chunks)[0]["text"] == text and chunks[-1]["choices"][0]["stop_reason"] == met
    if isinstance(met, str):
        kept = ask(http, messages=HELLO, stop=stop, include_stop_str_in_output=True)["choices"][0]["message"]["content"]
        assert kept == text + met


def test_sampling_fields_reach_the_engine(http: httpx2.Client, offline: LLM) -> None:
    """OpenAI's and Octavo's own: each gives the engine's tokens, and not those without it."""
    plain = {"seed": 3, "temperature": 1.2, "max_tokens": 10}
    usual = offline_answer(offline, **plain).outputs[0].token_ids
    other = int(usual[0] == 5) + 5
    fields: list[dict[str, Any]] = [
        {"temperature": 2.5},
        {"seed": 4},
        {"top_p": 0.1},
        {"logit_bias": {str(usual[0]): -100}},
        {"logit_bias": {str(other): 100}},
        {"presence_penalty": 2, "frequency_penalty": 2, "logit_bias": {str(other): 50}},
        {"top_k": 1},
        {"min_p": 0.9},
        {"repetition_penalty": 5},
        {"allowed_token_ids": [1, 2, 3]},
        {"stop_token_ids": [usual[2]]},
    ]
    for changed in fields:
        expected = offline_answer(offline, **{**plain, **changed}).outputs[0].token_ids
        assert expected != usual, changed
        body = ask(http, messages=HELLO, return_token_ids=True, **{**plain, **changed})
        assert body["choices"][0]["token_ids"] == expected, changed


def test_max_completion_tokens_is_max_tokens(http: httpx2.Client) -> None:
    """Alone, or beside an equal max_tokens."""
    assert ask(http, messages=HELLO, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert ask(http, messages=HELLO, max_completion_tokens=3, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_prompt_seen_before_is_cached(http: httpx2.Client) -> None:
    """Whole blocks of it, whole and streamed; never under another salt."""
    asked = {**GREEDY, "messages": [{"role": "user", "content": "Say it again, and again, please!"}]}
    assert ask(http, **asked, cache_salt="a")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = ask(http, **asked, cache_salt="a")["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < again["prompt_tokens"] and cached % 4 == 0
    streamed = stream(http, **asked, cache_salt="a", stream_options={"include_usage": True})[-1]["usage"]
    assert streamed["prompt_tokens_details"]["cached_tokens"] == cached
    assert ask(http, **asked, cache_salt="b")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_ids_of_request_and_tokens(http: httpx2.Client, offline: LLM) -> None:
    """The caller's id comes back, in body and header; ids of prompt and output come for who asks."""
    expected = offline_answer(offline, temperature=0, max_tokens=12)
    answer = http.post(CHAT, json={**GREEDY, "request_id": "mine", "return_token_ids": True})
    body = answer.json()
    assert (body["id"], answer.headers["x-request-id"]) == ("mine", "mine")
    assert body["prompt_token_ids"] == expected.prompt_token_ids and body["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    chunks = stream(http, **GREEDY, request_id="mine", return_token_ids=True)
    assert {chunk["id"] for chunk in chunks} == {"mine"} and joined(chunks)[0]["ids"] == expected.outputs[0].token_ids
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [expected.prompt_token_ids] + [None] * (len(chunks) - 1)


def test_prompt_logprobs(http: httpx2.Client, offline: LLM) -> None:
    """The engine's, whole and in the first chunk."""
    expected = offline_answer(offline, temperature=0, max_tokens=12, prompt_logprobs=2)
    told = ask(http, **GREEDY, prompt_logprobs=2)["prompt_logprobs"]
    assert told[0] is None and len(told) == len(expected.prompt_token_ids)
    for entry, one in zip(expected.prompt_logprobs[1:], told[1:], strict=True):
        assert {int(token) for token in one} == set(entry)
        assert [one[str(t)]["logprob"] for t in entry] == pytest.approx([value.logprob for value in entry.values()], abs=1e-5)
    first, *others = stream(http, **GREEDY, prompt_logprobs=2)
    assert first["prompt_logprobs"] == told and not any("prompt_logprobs" in chunk for chunk in others)


def test_messages_reach_the_template(http: httpx2.Client) -> None:
    """Text parts joined, roles as sent, an answer's own fields taken back, and no assistant's turn where none is wanted."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "Hi", "name": "me"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": "é"},
    ]
    text = "<developer>Be brief\n<user>Hi\n<assistant>No.\n<user>é\n"
    for generate in (True, False):
        body = ask(http, messages=messages, max_tokens=1, return_token_ids=True, add_generation_prompt=generate)
        told = http.post("/detokenize", json={"tokens": body["prompt_token_ids"]}).json()["prompt"]
        assert told == text + ("<assistant>" if generate else "")
    tokens = http.post("/tokenize", json={"messages": messages}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len((text + "<assistant>").encode()) and tokens["max_model_len"] == 256


SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["mood", "level"],
    "additionalProperties": False,
}


def test_response_format(http: httpx2.Client) -> None:
    """A random model writes what the schema allows; text is free."""
    named = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA, "strict": True}}
    asked = {"messages": HELLO, "temperature": 1.5, "max_tokens": 200}
    texts = set()
    for seed in range(4):
        (choice,) = ask(http, **asked, seed=seed, response_format=named)["choices"]
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
        texts.add(choice["message"]["content"])
        assert joined(stream(http, **asked, seed=seed, response_format=named))[0]["text"] == choice["message"]["content"]
    assert len(texts) > 1
    free = ask(http, **GREEDY, response_format={"type": "text"})["choices"][0]["message"]["content"]
    assert free == ask(http, **GREEDY)["choices"][0]["message"]["content"]
    begun = ask(http, **GREEDY, response_format={"type": "json_object"})["choices"][0]["message"]["content"]
    assert begun.lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_is_none_is_refused_in_its_fields_name(http: httpx2.Client, stream: bool) -> None:
    """response_format is to blame, not Octavo's own field, which nobody sent."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    error = refusal(http.post(CHAT, json={**GREEDY, "response_format": form, "stream": stream}))
    assert error["param"] == "response_format" and error["message"].startswith("response_format: ") and "nonsense" in error["message"]
    error = refusal(http.post(CHAT, json={**GREEDY, "structured_outputs": {"regex": "("}, "stream": stream}))
    assert error["param"] == "structured_outputs"


def test_beams_are_the_engines(http: httpx2.Client, offline: LLM) -> None:
    """n of them from the best; streamed, each comes at the end in one piece."""
    (expected,) = offline.beam_search(
        "<user>Hello\n<assistant>", BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5), use_tqdm=False
    )
    texts = [one.text for one in expected.outputs]
    asked = {"messages": HELLO, "n": 3, "max_tokens": 6, "use_beam_search": True, "length_penalty": 0.5, "temperature": 0}
    assert [choice["message"]["content"] for choice in ask(http, **asked)["choices"]] == texts
    chunks = stream(http, **asked)
    found = joined(chunks)
    assert [found[index]["text"] for index in range(3)] == texts and len(chunks) == 6
    for field, value in (("top_p", 0.5), ("stop", "x"), ("logprobs", True), ("structured_outputs", {"regex": "a"})):
        assert refusal(http.post(CHAT, json={**asked, field: value}))["param"] == field
    assert refusal(http.post(CHAT, json={**asked, "n": 17}))["param"] == "n"
    for field in ("length_penalty", "early_stopping"):
        assert "use_beam_search" in refusal(http.post(CHAT, json={**GREEDY, field: 1 if field == "length_penalty" else True}))["message"]


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_in_mid_stream_is_an_event(
    http: httpx2.Client, client: openai.OpenAI, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """What came before it stays, then the error, then [DONE]; OpenAI's client raises it (fault 42)."""
    run = engine.run

    async def breaking(*args: Any, **about: Any) -> Any:
        left = 4
        async for piece in run(*args, **about):
            yield piece
            left -= 1
            if not left:
                raise ZeroDivisionError("secret")

    monkeypatch.setattr(engine, "run", breaking)
    answer = http.post(CHAT, json={**GREEDY, "seed": 1, "temperature": 1, "n": n, "stream": True})
    *chunks, last = events(answer)
    assert answer.status_code == 200 and len(chunks) >= 4 and set(last) == {"error"}
    assert last["error"]["type"] == "server_error" and "secret" not in answer.text
    with pytest.raises(openai.APIError, match="server made a mistake"):
        for _ in client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            pass


def test_time_that_is_up(http: httpx2.Client) -> None:
    """408 where nothing was sent yet; in a stream that has begun, an error event."""
    asked = {"messages": HELLO, "max_tokens": 200, "timeout_s": 1e-6}
    for stream in (False, True):
        error = refusal(http.post(CHAT, json={**asked, "stream": stream}), 408)
        assert (error["type"], error["code"]) == ("timeout_error", "timeout") and "timeout_s" in error["message"]
    *chunks, last = events(http.post(CHAT, json={**asked, "timeout_s": 0.05, "stream": True}))
    assert last["error"]["code"] == "timeout" and chunks


def test_the_official_client(client: openai.OpenAI, script: Script) -> None:
    """Whole, streamed, and with its own accumulation of a stream."""
    script(*["Hi 👋"] * 4)
    whole = client.chat.completions.create(model="tiny", messages=HELLO)
    assert whole.choices[0].message.content == "Hi 👋" and whole._request_id == whole.id
    pieces = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Hi 👋"
    with client.chat.completions.stream(model="tiny", messages=HELLO, logprobs=True) as manager:
        assert len(list(manager)) > 4
        final = manager.get_final_completion().choices[0]
    assert final.message.content == "Hi 👋" and final.logprobs is not None and len(final.logprobs.content or []) == 8
    extra = client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"top_k": 1, "return_token_ids": True})
    assert len(extra.choices[0].model_extra["token_ids"]) == 8  # type: ignore[index]

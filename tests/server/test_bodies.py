"""What no JSON parser should take, and what a client may get wrong before its request is even read: 4xx that says why."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from octavo.server import errors
from octavo.server.errors import ApiError
from octavo.server.json_body import MAX_BRACKETS, MAX_DEPTH, MAX_MEMBERS, parse
from tests.server.conftest import serve

CHAT = "/v1/chat/completions"
ROUTES = (CHAT, "/v1/completions", "/tokenize", "/detokenize")
JSON = {"content-type": "application/json"}
GOOD = b'{"prompt": "a", "max_tokens": 1}'

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the body: Field required"),
    "cut": (b'{"prompt": "a"', "not valid JSON"),
    "no JSON": (b"prompt=a", "not valid JSON"),
    "no object": (b"[1]", "the body"),
    "null": (b"null", "the body"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN is no number"),
    "infinity": (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity is no number"),
    "too large a float": (b'{"prompt": "a", "metadata": {"x": 1e999}}', "1e999"),
    "too long a number": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "too long"),
    "twice": (b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
    "twice within": (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "'1' twice"),
    "half a character": (b'{"prompt": "a\\ud800"}', "half a surrogate pair"),
    "half a character in a key": (b'{"prompt": "a", "\\uDC00": 1}', "half a surrogate pair"),
    "half a character in bytes": (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
    "Latin-1": ('{"prompt": "ä"}'.encode("latin-1"), "not UTF-8"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    "deep lists": (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested deeper"),
    "deep objects": (b'{"prompt": "a", "structured_outputs": ' + b'{"a":' * 500 + b"1" + b"}" * 501, "nested deeper"),
}


def refusal(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str) and isinstance(error["type"], str) and error["code"]
    assert error["param"] is None or isinstance(error["param"], str)
    return error


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies(http: httpx2.Client, name: str, route: str) -> None:
    """400 with the reason; the server goes on."""
    content, reason = BROKEN[name]
    assert reason in refusal(http.post(route, content=content, headers=JSON))["message"]
    assert http.post("/v1/completions", content=GOOD, headers=JSON).status_code == 200


def test_depth_is_counted_not_brackets(http: httpx2.Client) -> None:
    """Many objects beside each other are fine, and so is nesting up to the limit; one level more is not."""
    inner: Any = "x"
    for _ in range(MAX_DEPTH - 1):  # the body itself is one
        inner = {"a": inner}
    body = {"messages": [{"role": "user", "content": "a"}] * 150, "max_tokens": 1, "metadata": inner}
    assert "nested deeper" not in http.post(CHAT, json=body).text
    assert "nested deeper" in refusal(http.post(CHAT, json={**body, "metadata": {"a": inner}}))["message"]


def test_millions_of_lists_are_refused_before_they_are_read(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them would take many seconds in which nobody is answered; just as many as may be are read."""
    most = json.dumps({"prompt": [[1]] * (MAX_BRACKETS - 2), "max_tokens": 1}).encode()
    assert "1 to 1024" in refusal(http.post("/v1/completions", content=most, headers=JSON))["message"]
    monkeypatch.setattr("octavo.server.json_body.json.loads", lambda *_, **__: pytest.fail("it was read"))
    too_many = b'{"prompt": [' + b"[1]," * (MAX_BRACKETS - 1) + b"[1]]}"
    assert f"more than {MAX_BRACKETS:,}" in http.post("/v1/completions", content=too_many, headers=JSON).text


def test_brackets_in_a_text_open_nothing() -> None:
    """A prompt of JSON or code is not refused for them, whatever it escapes; a text that never ends is looked at once."""
    prompt = '[{"a": "b\\"}]' * MAX_BRACKETS
    assert parse(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}
    with pytest.raises(ApiError, match="opening brackets"):
        parse(json.dumps({"prompt": prompt, "ids": [[1]] * MAX_BRACKETS}).encode())
    with pytest.raises(ApiError, match="not valid JSON"):
        parse(b"{" * 10 + b'"' + b'\\"[' * 2_000_000)


def test_pairs_of_surrogates_and_nul_are_characters(http: httpx2.Client) -> None:
    """An escaped emoji is whole, and NUL is a character like others."""
    for content in (b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}', b'{"prompt": "a\\u0000b", "max_tokens": 1}'):
        assert http.post("/v1/completions", content=content, headers=JSON).status_code == 200
    ids = http.post("/tokenize", content=b'{"prompt": "\\ud83d\\ude00\\u0000"}', headers=JSON).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "😀\0"}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"])
@pytest.mark.parametrize("route", ROUTES)
def test_wrong_content_types(http: httpx2.Client, kind: str, route: str) -> None:
    """415 that names the header and what it must be."""
    error = refusal(http.post(route, content=GOOD, headers={"content-type": kind} if kind else {}), 415)
    assert "application/json" in error["message"] and error["param"] == "Content-Type"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_right_content_types(http: httpx2.Client, kind: str) -> None:
    """Any way to write it."""
    assert http.post("/v1/completions", content=GOOD, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", CHAT, 405), ("PUT", CHAT, 405), ("POST", "/v1/models", 405), ("GET", "/v1/no", 404)]
)
def test_wrong_methods_and_paths(http: httpx2.Client, method: str, path: str, status: int) -> None:
    """405 that tells the right method, 404, both in OpenAI's form."""
    answer = http.request(method, path)
    assert f"{method} {path}" in refusal(answer, status)["message"]
    assert status == 404 or answer.headers["allow"] in ("POST", "GET")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_not_fill_memory(engine: Any, new_http: Any, chunked: bool) -> None:
    """413 whether its length is told beforehand or found out on the way."""
    http = new_http(serve(engine, max_body_bytes=1024))
    content = b'{"prompt": "' + b"a" * 2000 + b'"}'

    class Pieces(httpx2.SyncByteStream, httpx2.AsyncByteStream):  # a synchronous client, an asynchronous app
        async def __aiter__(self) -> Any:
            yield content[:1000]
            yield content[1000:]

    request = http.build_request("POST", "/v1/completions", content=content, headers=JSON)
    if chunked:
        request = httpx2.Request("POST", request.url, headers=JSON, stream=Pieces())
    assert "1024 bytes" in refusal(http.send(request), 413)["message"]


def test_the_official_client_knows_the_errors(client: openai.OpenAI) -> None:
    """Each status is its exception, with the fields that it reads."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as lost:
        client.completions.create(model="gpt-5", prompt="a")
    assert (lost.value.param, lost.value.code) == ("model", "model_not_found")


def test_an_error_of_the_server_itself_is_a_500_in_the_same_form(engine: Any, new_http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of its inside is told."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(engine.prompts, "conversation", fail)
    answer = new_http(serve(engine), raises=False).post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})
    assert refusal(answer, 500)["type"] == "server_error" and "secret" not in json.dumps(answer.json())


MANY = 40_000  # within what is read at all
WRONG = {
    "prompts": ("/v1/completions", b'{"prompt": [' + b",".join([b"{}"] * MANY) + b"]}", "prompt[0]"),
    "lists of ids": ("/v1/completions", b'{"prompt": [' + b",".join([b"[{}]"] * MANY) + b"]}", "prompt[0][0]"),
    "stops": ("/v1/completions", b'{"prompt": "a", "stop": [' + b",".join([b"1"] * MANY) + b"]}", "stop[0]"),
    "messages": (CHAT, b'{"messages": [' + b",".join([b"{}"] * MANY) + b"]}", "messages[0].role"),
    "parts": (CHAT, b'{"messages": [{"role": "user", "content": [' + b",".join([b"{}"] * MANY) + b"]}]}", "messages[0].content[0].type"),
    "tools": (CHAT, b'{"messages": [{"role": "user"}], "tools": [' + b",".join([b"{}"] * MANY) + b"]}", "tools[0].type"),
    "ids": ("/detokenize", b'{"tokens": [' + b",".join([b'"a"'] * MANY) + b"]}", "tokens[0]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_many_mistakes_are_not_all_looked_for(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first wrong item of a list is told and the others are not read: each error costs memory and time that everybody waits for."""
    found: list[int] = []
    invalid = errors._invalid
    monkeypatch.setattr(errors, "_invalid", lambda error: found.append(len(error.errors())) or invalid(error))
    route, content, field = WRONG[name]
    assert refusal(http.post(route, content=content, headers=JSON))["param"] == field
    assert found and found[0] < 10


@pytest.mark.parametrize("place", [b'{"prompt": "a", %s}', b'{"prompt": "a", "logit_bias": {%s}}'])
def test_an_object_has_no_end_of_members(http: httpx2.Client, place: bytes) -> None:
    """Each unknown one would be an error of its own, so there is a most."""
    members = b",".join(b'"%d":"x"' % number for number in range(MAX_MEMBERS + 1))
    assert f"{MAX_MEMBERS} is the most" in refusal(http.post("/v1/completions", content=place % members, headers=JSON))["message"]


def test_a_text_that_cannot_fit_is_refused_unread(http: httpx2.Client, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its characters, as megabytes take minutes to turn into tokens; whoever asks for tokens alone gets them."""
    tokenizer = engine.prompts.tokenizer
    most = engine.built.engine.max_model_len * tokenizer.longest_token
    longest = max(tokenizer._backend.get_vocab(), key=len)
    assert len(longest) == tokenizer.longest_token
    text = "a" * (most + 1)
    assert http.post("/tokenize", json={"prompt": text}).json()["count"] > engine.built.engine.max_model_len
    monkeypatch.setattr(tokenizer, "_encode", None)
    for route, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a" * (most + 1)], "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
    ):
        assert f"max_model_len {engine.built.engine.max_model_len}" in refusal(http.post(route, json=body))["message"]

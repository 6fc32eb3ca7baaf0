"""Who may call, as which class, and what a class's limits do: refused with numbers, queued, or ended, and never a block lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from octavo.async_llm import AsyncLLM
from tests.server.conftest import ENGINE, Loop, NewClient, assert_empty, events, official, opened, serve
from tests.server.test_bodies import CHAT, refusal
from tests.server.test_chat import HELLO

KEYS = {"api_key": ("sk-gold", "sk-any", "sk-ü"), "classes_by_key": {"sk-gold": "gold"}}
ROUTES = [
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 1}),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [1]}),
]
CLASSES = {
    "gold": {},
    "short": {"max_input_tokens": 30, "max_output_tokens": 5},
    "narrow": {"max_running": 1},
    "full": {"max_running": 1, "max_queue": 1},
    "hasty": {"timeout_s": 0.02},
}


@pytest.fixture(scope="module")
def shared_engine(folder: Path, loop: Loop) -> Iterator[AsyncLLM]:
    """One whose config has classes."""
    config = folder.parent / "classes.toml"
    config.write_text(
        "[scheduler]\nplugin = 'chunked'\n"
        + "".join(
            f"[scheduler.classes.{name}]\n" + "".join(f"{key} = {value}\n" for key, value in limits.items())
            for name, limits in CLASSES.items()
        )
    )
    llm = loop.run(opened(model=folder, config=config, **ENGINE))
    yield llm
    loop.run(llm.close())


def of_class(name: str) -> dict[str, str]:
    return {"X-Octavo-Class": name}


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=lambda value: str(value)[:20])
def test_keys(engine: AsyncLLM, new_http: NewClient, method: str, path: str, body: Any) -> None:
    """Without a key, with a wrong one or another scheme: 401 that says what is wanted. Any of the server's keys will do."""
    http = new_http(serve(engine, **KEYS))
    for header in (None, "", "Bearer", "Bearer ", "Bearer sk-no", "Basic sk-any", "sk-any", b"Bearer \xff\xfe", "Bearer sk-any sk-any"):
        answer = http.request(method, path, json=body, headers={} if header is None else {"Authorization": header})
        error = refusal(answer, 401)
        assert (error["type"], error["code"], answer.headers["www-authenticate"]) == ("authentication_error", "invalid_api_key", "Bearer")
        assert "Authorization: Bearer" in error["message"] and "sk-" not in error["message"].replace("KEY", "")
    for header in ("Bearer sk-any", "bearer sk-any", "Bearer  sk-gold ", "Bearer sk-ü".encode()):
        assert http.request(method, path, json=body, headers={"Authorization": header}).status_code == 200, header


def test_what_needs_no_key(engine: AsyncLLM, new_http: NewClient) -> None:
    """Probes have none."""
    http = new_http(serve(engine, **KEYS))
    for path in ("/health", "/ready", "/version"):
        assert http.get(path).status_code == 200


def test_the_official_client_brings_its_key(engine: AsyncLLM, new_http: NewClient) -> None:
    """Its own errors."""
    http = new_http(serve(engine, **KEYS))
    assert official(http, "sk-any").models.list().data
    with pytest.raises(openai.AuthenticationError):
        official(http, "sk-no").models.list()


def test_classes_by_header_and_key(engine: AsyncLLM, new_http: NewClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's own class, else the header's, else default; another than the key's is a 403, an unknown one a 400."""
    met: list[str] = []
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda *args, **about: (met.append(about["class"]), run(*args, **about))[1])
    http = new_http(serve(engine, **KEYS))

    def ask(key: str, **headers: str) -> httpx2.Response:
        return http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"Authorization": f"Bearer {key}", **headers})

    assert ask("sk-gold").status_code == ask("sk-gold", **of_class("gold")).status_code == 200
    assert ask("sk-any").status_code == ask("sk-any", **of_class("narrow")).status_code == 200
    assert met == ["gold", "gold", "default", "narrow"]
    error = refusal(ask("sk-gold", **of_class("narrow")), 403)
    assert (error["type"], error["param"]) == ("permission_error", "X-Octavo-Class") and "'gold'" in error["message"]
    error = refusal(ask("sk-any", **of_class("no-such")))
    assert error["param"] == "class" and "gold" in error["message"]


def test_lengths(http: httpx2.Client) -> None:
    """400 with both numbers, at once; the same request of another class is fine."""
    long: Any = [{"role": "user", "content": "a" * 30}]
    for messages, most, numbers in ((long, 5, ("48", "30")), (HELLO, 6, ("6", "5"))):
        body = {"messages": messages, "max_tokens": most}
        error = refusal(http.post(CHAT, json=body, headers=of_class("short")))
        assert all(number in error["message"] for number in numbers), error
        assert http.post(CHAT, json=body, headers=of_class("gold")).status_code == 200


def test_a_class_says_how_long_an_answer_may_be(http: httpx2.Client) -> None:
    """To who says nothing, as most clients do."""
    body = {"messages": HELLO, "ignore_eos": True}
    assert http.post(CHAT, json=body, headers=of_class("short")).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("asked", [{}, {"timeout_s": 60.0}, {"timeout_s": 0.001}])
def test_a_class_has_a_timeout(http: httpx2.Client, asked: dict[str, float]) -> None:
    """Whatever the request asks for; another class has none."""
    body = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True, **asked}
    assert refusal(http.post(CHAT, json=body, headers=of_class("hasty")), 408)["code"] == "timeout"
    assert asked.get("timeout_s") == 0.001 or http.post(CHAT, json=body).status_code == 200


class Busy:
    """Requests that run in threads until they are let go."""

    def __init__(self, http: httpx2.Client, headers: dict[str, str]) -> None:
        self._http, self._headers = http, headers
        self._threads: list[threading.Thread] = []
        self.statuses: list[int] = []
        self.bodies: list[Any] = []

    def ask(self, **fields: Any) -> None:
        def call() -> None:
            answer = self._http.post(CHAT, json={"messages": HELLO, "max_tokens": 200, **fields}, headers=self._headers)
            self.statuses.append(answer.status_code)
            self.bodies.append(answer)

        self._threads.append(threading.Thread(target=call))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def held(engine: AsyncLLM) -> Iterator[threading.Event]:
    """The engine's steps wait until this is set."""
    gate = threading.Event()
    step = engine.built.engine.step

    def waiting() -> Any:
        gate.wait(30)
        return step()

    engine.built.engine.step = waiting  # type: ignore[method-assign]
    yield gate
    gate.set()
    engine.built.engine.step = step  # type: ignore[method-assign]


def test_a_running_limit_makes_others_wait(http: httpx2.Client, engine: AsyncLLM) -> None:
    """One at a time of this class; all are answered."""
    most: list[int] = []

    class Watch:
        def octavo_step_finished(self, report: Any) -> None:
            most.append(report.num_running)

    watch = Watch()
    engine.built.engine.observers.add(watch)
    busy = Busy(http, of_class("narrow"))
    for _ in range(4):
        busy.ask(max_tokens=20)
    busy.join()
    assert busy.statuses == [200] * 4 and max(most) == 1


def test_a_full_queue(http: httpx2.Client, engine: AsyncLLM, held: threading.Event) -> None:
    """429 with Retry-After for whoever comes too many; those before are answered, and later there is room again."""
    core = engine.built.engine
    busy = Busy(http, of_class("full"))
    busy.ask(max_tokens=20)
    until(lambda: engine.engine_loop.step_began is not None)  # its step waits, so it waits in the queue
    late = Busy(http, of_class("full"))
    late.ask(max_tokens=3)
    late.ask(max_tokens=3, stream=True)
    until(lambda: len(engine.engine_loop._inbox) == 2)
    held.set()
    busy.join()
    late.join()
    assert busy.statuses == [200]
    assert sorted(late.statuses) == [200, 429]
    (answer,) = (answer for answer in late.bodies if answer.status_code == 429)
    error = refusal(answer, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full") and int(answer.headers["retry-after"]) >= 1
    assert "max_queue is 1" in error["message"]
    assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers=of_class("full")).status_code == 200
    assert not core.requests


@pytest.mark.parametrize("where", ["request", "server", "most"])
def test_timeouts_give_everything_back(engine: AsyncLLM, new_http: NewClient, where: str) -> None:
    """408, or an error event in a stream, whoever set the time; the pool is empty afterwards."""
    settings: dict[str, Any] = {"request": {}, "server": {"timeout_s": 0.02}, "most": {"max_timeout_s": 0.02}}[where]
    http = new_http(serve(engine, **settings))
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 230, "n": 4, **({"timeout_s": 0.02} if where == "request" else {})}
    error = refusal(http.post(CHAT, json=body), 408)
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    answer = http.post(CHAT, json={**body, "stream": True})
    if answer.status_code == 200:
        assert events(answer)[-1]["error"]["code"] == "timeout"
    else:  # a slow machine: not even one token
        refusal(answer, 408)
    assert_empty(engine)
    with pytest.raises(openai.APIStatusError) as gone:
        official(http).chat.completions.create(model="tiny", messages=HELLO, max_tokens=230, n=4, timeout=60, extra_body=body)
    assert gone.value.status_code == 408


def test_more_time_than_the_server_allows(engine: AsyncLLM, new_http: NewClient) -> None:
    """400 with both numbers; less is fine."""
    http = new_http(serve(engine, max_timeout_s=5))
    error = refusal(http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "timeout_s": 6}))
    assert error["param"] == "timeout_s" and "6" in error["message"] and "5" in error["message"]
    assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "timeout_s": 4}).status_code == 200


def test_keys_are_never_told(engine: AsyncLLM, new_http: NewClient) -> None:
    """Not in the OpenAPI document, nor in any error."""
    http = new_http(serve(engine, **KEYS))
    assert "sk-" not in json.dumps(http.get("/openapi.json").json())

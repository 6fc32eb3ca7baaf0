"""One tiny engine and one event loop for all tests of this folder, and clients that call apps around it without a socket.

The loop runs in a thread, so tests are plain functions and use the synchronous client.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import pytest
import uvicorn

from octavo import LLM
from octavo.async_llm import AsyncLLM
from octavo.server.app import create_app
from octavo.server.served import Served
from octavo.server.settings import ServerSettings
from tests.llm.conftest import TEMPLATE
from tests.models import tiny

Result = TypeVar("Result")
BOUND = 60.0
MODEL = "tiny"
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "debug": True,
    "max_model_len": 256,
    "block_size": 4,
    "max_num_seqs": 16,
    "num_kv_slots": 4096,
}


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run it there, within a bound."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(BOUND)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(BOUND)
        self.loop.close()


class InProcess(httpx2.BaseTransport):
    """Calls an app in the loop's thread. What an app fails at is raised, unless `raises` says otherwise."""

    def __init__(self, app: Any, loop: Loop, *, raises: bool = True) -> None:
        self._inner = httpx2.ASGITransport(app, raise_app_exceptions=raises)
        self._loop = loop

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return self._loop.run(self._answer(request))

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        answer = await self._inner.handle_async_request(request)
        return httpx2.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the tiny model, with a chat template that reads no tools."""
    folder = tmp_path_factory.mktemp("server") / "tiny-chat"
    shutil.copytree(tiny("llama_gqa"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    """The event loop of all engines."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def offline(folder: Path) -> Iterator[LLM]:
    """The same model without a server, to compare with."""
    with LLM(model=folder, **ENGINE) as llm:
        yield llm


async def opened(**settings: Any) -> AsyncLLM:
    return AsyncLLM(**settings)


@pytest.fixture(scope="session")
def shared_engine(folder: Path, loop: Loop) -> Iterator[AsyncLLM]:
    """For `engine`."""
    llm = loop.run(opened(model=folder, **ENGINE))
    yield llm
    loop.run(llm.close())


@pytest.fixture(scope="session")
def wide_engine(tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[AsyncLLM]:
    """The same model with a longer context."""
    folder = tmp_path_factory.mktemp("wide") / "tiny-chat"
    shutil.copytree(tiny("llama_gqa", max_position_embeddings=2048), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    llm = loop.run(opened(model=folder, **ENGINE | {"max_model_len": 2048, "num_kv_slots": 16384, "block_size": 16}))
    yield llm
    loop.run(llm.close())


@pytest.fixture
def engine(shared_engine: AsyncLLM) -> Iterator[AsyncLLM]:
    """Invariants checked. Each test must leave it empty."""
    yield shared_engine
    assert_empty(shared_engine)


def assert_empty(llm: AsyncLLM) -> None:
    """Nobody is in the engine, no slot is held, nobody reads; soon, as the last request may just be ending."""
    end = time.monotonic() + BOUND
    while (llm.built.engine.has_work or llm._open) and time.monotonic() < end:
        time.sleep(0.002)
    usage = llm.built.engine.kv.usage()
    assert not llm.built.engine.requests and usage.filled == usage.held == 0
    assert not llm._open and not llm._calls and not llm._mailboxes


def serve(llm: AsyncLLM, **settings: Any) -> Any:
    """An app around an engine."""
    return create_app(Served(llm, ServerSettings(**settings), (MODEL,)))


NewClient = Callable[..., httpx2.Client]


@pytest.fixture
def new_http(loop: Loop) -> Iterator[NewClient]:
    """Make a plain client of an app."""
    made: list[httpx2.Client] = []

    def make(app: Any, **options: Any) -> httpx2.Client:
        made.append(httpx2.Client(transport=InProcess(app, loop, **options), base_url="http://octavo"))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def http(engine: AsyncLLM, new_http: NewClient) -> httpx2.Client:
    """A plain client of an app with no settings."""
    return new_http(serve(engine))


def official(http: httpx2.Client, api_key: str = "none") -> openai.OpenAI:
    """OpenAI's own client. It tries nothing twice: tests want to see each answer."""
    return openai.OpenAI(api_key=api_key, base_url="http://octavo/v1", http_client=http, max_retries=0)


@pytest.fixture
def client(http: httpx2.Client) -> openai.OpenAI:
    """OpenAI's own client of an app with no settings."""
    return official(http)


def events(answer: httpx2.Response) -> list[Any]:
    """The contents of a stream of events; it must end with [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last, rest = answer.text.split("\n\n")
    assert rest == "" and last == "data: [DONE]" and all(part.startswith("data: ") for part in parts), answer.text
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.fixture
def address(engine: AsyncLLM, loop: Loop) -> Iterator[str]:
    """An app with no settings behind a real socket."""
    server = uvicorn.Server(uvicorn.Config(serve(engine), lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.run_coroutine_threadsafe(server.serve([listener]), loop.loop)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        running.result(BOUND)


END = 300  # the token that ends a scripted output
Script = Callable[..., None]


class _Forced:
    """A logits processor that leaves one token at each place."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, output: list[int], logits: Any) -> Any:
        if len(output) >= len(self._token_ids):
            return logits
        forced = logits.new_full(logits.shape, float("-inf"))
        forced[self._token_ids[len(output)]] = 0.0
        return forced


@pytest.fixture
def script(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Script:
    """`script(text, ...)`: from now on each request gets the next of these texts, one byte a token, as its answer."""
    run = engine.run

    def write(*texts: str) -> None:
        waiting = list(texts)

        def scripted(ready: Any, params: Any, **about: Any) -> Any:
            ids = [*engine.prompts.tokenizer.encode(waiting.pop(0)), END]
            limit = len(ids) if params.max_tokens is None else min(params.max_tokens, len(ids))
            changed = {"temperature": 0.0, "stop_token_ids": (END,), "max_tokens": limit, "logits_processors": (_Forced(ids),)}
            return run(ready, replace(params, **changed), **about)

        monkeypatch.setattr(engine, "run", scripted)

    return write


@pytest.fixture
def begins(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Script:
    """`begins(text)`: from now on each answer begins with this text, one byte a token, and goes on as the model likes."""
    run = engine.run

    def write(text: str) -> None:
        processors = (_Forced(engine.prompts.tokenizer.encode(text)),)
        monkeypatch.setattr(
            engine, "run", lambda ready, params, **about: run(ready, replace(params, logits_processors=processors), **about)
        )

    return write

"""The log's one line a request: its numbers are those of the answer, and what people wrote is not in it unless asked for."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import OutOfMemoryError
from octavo.server.app import create_app
from octavo.server.logs import JsonFormatter, TextFormatter
from tests.models import tiny
from tests.server.observed import die, run, serving, value

SECRET = "my password is swordfish"


@pytest.fixture(scope="session")
def folder() -> Path:
    """A folder of the tiny model."""
    return tiny("llama_gqa")


@pytest.fixture
def logged() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Everything that octavo logs from now on, as `--log-format json` writes it."""
    stream, logger = io.StringIO(), logging.getLogger("octavo")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(level)


def lines(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of requests."""
    return [entry for entry in entries if entry["logger"] == "octavo.access"]


def test_a_line_says_what_came(folder: Path, logged: Callable[[], list[dict[str, Any]]]) -> None:
    """One for each HTTP request, streamed or not, with one prompt or several, with the engine's numbers."""

    async def test() -> None:
        async with serving(folder) as server:
            one = (await server.complete(list(range(20)), request_id="one")).json()
            await server.complete(list(range(20)), request_id="two", stream=True, max_tokens=5)
            await server.complete([[1, 2], [3, 4, 5]], request_id="many", max_tokens=3)
            await server.client.get("/v1/models")
            await server.client.get("/health")
            await server.idle()
            await asyncio.sleep(0)
            first, second, many, models = lines(logged())
            assert (first["method"], first["path"], first["status"], first["model"]) == ("POST", "/v1/completions", 200, "tiny")
            assert (first["id"], first["class"], first["finish_reason"]) == ("one", "default", "length")
            assert {name: first[name] for name in ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions")} == {
                "prompt_tokens": one["usage"]["prompt_tokens"],
                "output_tokens": one["usage"]["completion_tokens"],
                "cached_tokens": 0,
                "preemptions": 0,
            }
            times = server.answers[0].times
            assert times is not None and times.first_token is not None
            assert first["first_token_seconds"] == pytest.approx(times.first_token - times.arrival, abs=1e-5)
            assert 0 <= first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"]
            assert (second["output_tokens"], second["cached_tokens"], second["status"]) == (5, 16, 200)
            assert (many["prompt_tokens"], many["output_tokens"], many["id"]) == (5, 6, ["many-0", "many-1"])
            assert models["path"] == "/v1/models" and "prompt_tokens" not in models
            assert not server.here.access_log._by_id and not server.here.access_log._waiting

    run(test())


def test_how_it_went_wrong_is_told(folder: Path, logged: Callable[[], list[dict[str, Any]]]) -> None:
    """A refusal has its status, a client that left 499 and what it got by then, a timeout and an error their reason."""

    async def test() -> None:
        async with serving(folder) as server:
            await server.complete([1], max_tokens=-1)
            await server.complete([1] * 500)
            leaver = asyncio.create_task(server.complete([1, 2, 3], request_id="left", max_tokens=100))
            while len(server.reports) < 2:
                await asyncio.sleep(0.001)
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
            await server.idle()
            await server.complete([1, 2], max_tokens=100, timeout_s=0.001)
            engine = server.here.llm.built.engine
            submit = engine.runner.submit

            def failing(plan: Any) -> Any:
                engine.runner.submit = submit  # type: ignore[method-assign]
                raise ValueError("broken")

            engine.runner.submit = failing  # type: ignore[method-assign]
            await server.complete([4, 4])
            found = [(line["status"], line.get("finish_reason")) for line in lines(logged())]
            assert found == [(400, None), (400, None), (499, "abort"), (408, "timeout"), (500, "error")]
            left = next(line for line in lines(logged()) if line.get("id") == "left")
            (told,) = (answer for answer in server.answers if answer.request_id == "left")
            assert left["output_tokens"] == len(told.outputs[0].token_ids) < 100
            assert not server.here.access_log._by_id and not server.here.access_log._waiting

    run(test())


def test_half_a_body_is_a_client_that_left(folder: Path, logged: Callable[[], list[dict[str, Any]]]) -> None:
    """Not a bad request: 499, in the log and in the metrics."""

    async def test() -> None:
        async with serving(folder) as server:
            messages = [{"type": "http.request", "body": b'{"prompt": [1', "more_body": True}, {"type": "http.disconnect"}]

            async def receive() -> Any:
                return messages.pop(0)

            async def send(message: Any) -> None:
                assert not (message["type"] == "http.response.start" and message["status"] < 499)

            headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
            await create_app(server.here)(scope, receive, send)
            assert [line["status"] for line in lines(logged())] == [499]
            found = await server.metrics()
            assert value(found, "octavo:http_requests_total", method="POST", handler="/v1/completions", status="499") == 1

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_prompts_are_not_in_the_log(folder: Path, stream: bool, logged: Callable[[], list[dict[str, Any]]]) -> None:
    """Neither of answered requests nor of refused, failed, timed-out ones; nor what came out."""

    async def test() -> None:
        async with serving(folder, server={"flight_steps": 8}) as server:
            engine = server.here.llm.built.engine
            await server.complete(SECRET, stream=stream)
            await server.complete(SECRET, max_tokens=100, timeout_s=0.001, stream=stream)
            await server.complete(SECRET * 10, stream=stream)
            await server.complete(SECRET, n=SECRET, stream=stream)
            await server.complete({"text": SECRET}, stream=stream)
            await server.client.post("/v1/completions", content=f'{{"prompt": "{SECRET}", ')
            await server.client.post("/v1/chat/completions", json={"messages": [{"role": SECRET, "content": SECRET}]})
            submit = engine.runner.submit
            for error in (OutOfMemoryError("full"), ValueError("broken")):

                def failing(plan: Any, error: Exception = error) -> Any:
                    engine.runner.submit = submit  # type: ignore[method-assign]
                    raise error

                engine.runner.submit = failing  # type: ignore[method-assign]
                await server.complete(SECRET, stream=stream)
            answer = (await server.complete(SECRET, max_tokens=20)).json()["choices"][0]["text"]
            text = json.dumps(logged(), ensure_ascii=False)
            assert len(lines(logged())) == 10 and "a step failed" in text
            assert "swordfish" not in text and "password" not in text
            assert answer not in text and str(list(SECRET.encode()))[1:20] not in text

    run(test())


def test_prompts_are_in_the_log_where_asked_for(folder: Path, logged: Callable[[], list[dict[str, Any]]]) -> None:
    """With log_prompts, as they came: text or ids."""

    async def test() -> None:
        async with serving(folder, server={"log_prompts": True}) as server:
            await server.complete(SECRET)
            await server.complete([1, 2, 3])
            await server.idle()
            assert [line["prompt"] for line in lines(logged())] == [SECRET, [1, 2, 3]]

    run(test())


def test_a_dead_engine_leaves_no_line_behind(folder: Path, logged: Callable[[], list[dict[str, Any]]]) -> None:
    """Streams that were running are logged although the engine never ended them."""

    async def test() -> None:
        async with serving(folder) as server:
            log = server.here.access_log
            streams = [asyncio.create_task(server.complete([1, i], max_tokens=100, stream=True)) for i in range(2)]
            while sum(report.num_rows == 2 for report in server.reports) < 5:  # both streams have begun
                await asyncio.sleep(0.001)
            server.here.llm.on_death = lambda error: log.flush()
            server.here.llm.engine_loop.post(die)
            await asyncio.gather(*streams)
            assert [line["status"] for line in lines(logged())] == [200, 200]
            assert not log._by_id and not log._waiting

    run(test())


def test_lines_of_text_carry_the_same() -> None:
    """Without JSON the fields come behind the message."""
    record = logging.LogRecord("octavo.access", logging.INFO, "", 0, "%s %s %d", ("POST", "/v1/completions", 200), None)
    record.fields = {"id": "one", "output_tokens": 3}
    assert TextFormatter().format(record).endswith("INFO octavo.access: POST /v1/completions 200 id=one output_tokens=3")


def test_callers_words_begin_no_line() -> None:
    """Ids and paths are the callers' own: a line of text stays one line, and a terminal obeys nothing of it."""
    record = logging.LogRecord("octavo.access", logging.INFO, "", 0, "POST %s 404", ("/v1/a\nb\x1b[31mü",), None)
    record.fields = {"id": "one\r\n2026-01-01 INFO octavo.server: forged\u2028x"}
    line = TextFormatter().format(record)
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert "/v1/a\\nb\\x1b[31mü" in line and "id=one\\r\\n2026" in line
    record = logging.LogRecord("octavo.server", logging.ERROR, "", 0, "first\n  second", (), None)
    assert TextFormatter().format(record).splitlines()[1] == "  second"  # our own words may have lines

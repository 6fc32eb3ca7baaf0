"""The OpenAPI document: complete, and true: whatever is sent by it, or against it, is answered as it says."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.async_llm import AsyncLLM
from tests.server.conftest import BOUND, Loop, serve

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
OPEN = ("/health", "/ready", "/version", "/metrics")  # for probes, which have no key
NO_BODY = ("/v1/models", "/v1/models/{name}", "/load", "/reset_prefix_cache", "/debug/kv", "/debug/flight", "/debug/engine", *OPEN)
STREAMS = ("/v1/chat/completions", "/v1/completions")
ERRORS = {"400", "401", "403", "404", "408", "413", "415", "429", "500", "503"}


@pytest.fixture
def document(http: httpx2.Client) -> Any:
    """As anybody gets it."""
    return http.get("/openapi.json").json()


def test_every_route_says_what_it_takes_and_gives(document: Any) -> None:
    """Bodies, answers, errors, streams, keys, classes; a 422 is never sent."""
    schemas = document["components"]["schemas"]
    assert set(document["paths"]) == {*POSTS, *NO_BODY}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["description"] and "422" not in operation["responses"]
            if path not in OPEN:
                assert set(operation["responses"]) >= ERRORS
                for status in ERRORS:
                    assert operation["responses"][status]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
                assert operation["security"] == [{"HTTPBearer": []}]
                assert "X-Octavo-Class" in [parameter["name"] for parameter in operation["parameters"]]
    for path in POSTS:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert schemas[body.rsplit("/", 1)[1]]["additionalProperties"] is False
    for path in STREAMS:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
        assert content["text/event-stream"]["x-event-data"]["$ref"].rsplit("/", 1)[1] in schemas
    assert {"HTTPValidationError", "ValidationError"}.isdisjoint(schemas)


def test_every_field_is_described(document: Any) -> None:
    """Those of sampling say what they may be."""
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        fields = document["components"]["schemas"][name]["properties"]
        for field in ("temperature", "n", "stop", "logit_bias", "top_k"):
            assert "It must be a" in fields[field]["description"]


@pytest.fixture
def url(engine: AsyncLLM, loop: Loop) -> Iterator[str]:
    """A server that gives no request much time."""
    app = serve(engine, timeout_s=0.2, max_timeout_s=0.2)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.run_coroutine_threadsafe(server.serve([listener]), loop.loop)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        running.result(BOUND)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


NEEDED = {"messages", "prompt", "tokens"}


def thinned(case: Any, data: st.DataObject) -> None:
    """Leave a few of its many fields, so that now and then all of them are fine, and name a model and a class that exist."""
    case.headers.pop("X-Octavo-Class", None)
    if isinstance(case.body, dict):
        optional = sorted(set(case.body) - NEEDED)
        kept = data.draw(st.sets(st.sampled_from(optional), max_size=3)) if optional else set()
        for name in set(optional) - kept:
            del case.body[name]
        if case.body.get("model") is not None:
            case.body["model"] = "tiny"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "valid"), [*((path, valid) for path in POSTS for valid in (True, False)), *((path, True) for path in NO_BODY)]
)
def test_whatever_is_generated_is_answered_as_documented(document: Any, url: str, engine: AsyncLLM, path: str, valid: bool) -> None:
    """Requests by the document and against it: no 500, no status, type or body that it does not name; the engine lives."""
    schema = schemathesis.openapi.from_dict(document)
    (operation,) = (found.ok() for found in schema.get_all_operations() if found.ok().path == path)
    mode = schemathesis.GenerationMode.POSITIVE if valid else schemathesis.GenerationMode.NEGATIVE
    met = Counter[int]()
    with requests.Session() as session:

        @settings(max_examples=40, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode), st.data())
        def send(case: Any, data: st.DataObject) -> None:
            if valid:
                thinned(case, data)
            answer = case.call(base_url=url, session=session, timeout=BOUND)
            met[answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)

        send()
    assert engine.engine_loop.alive
    assert met[200] or met[408] or path == "/v1/models/{name}" if valid else sum(met.values()) > met[200]

"""What docs/explanation/security.md promises of keys. The network is refused to a whole process in test_process.py."""

from __future__ import annotations

import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.errors import InvalidOptionsError
from octavo.core.registry import Registry
from octavo.core.settings.config import load_config
from octavo.server.settings import ServerSettings
from tests.server.conftest import NewClient, serve

OPEN = {"/health", "/ready", "/version", "/metrics"}


def test_every_other_route_wants_a_key(engine: AsyncLLM, new_http: NewClient) -> None:
    """Whatever routes there are: those of probes and scrapers are open, all others are 401 without a valid key."""
    app = serve(engine, api_key=("secret",))
    http = new_http(app)
    asked = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    assert ("POST", "/v1/completions") in asked and ("GET", "/debug/kv") in asked
    for method, path in sorted(asked):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status = http.request(method, path, headers=headers, json={} if method == "POST" else None).status_code
            assert (status != 401) == (path in OPEN), f"{method} {path} with {headers}: {status}"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json"])
def test_open_routes_are_open(engine: AsyncLLM, new_http: NewClient, path: str) -> None:
    """Probes and scrapers bring no key."""
    assert new_http(serve(engine, api_key=("secret",))).get(path).status_code == 200


def test_a_key_of_a_wrong_type_is_not_shown() -> None:
    """The error names the setting and keeps the value to itself."""
    with pytest.raises(InvalidOptionsError) as caught:
        load_config(Registry.discover(environ={}), environ={}, overrides={"server": {"api_key": [["s3cret"]]}}, server=ServerSettings)
    assert "server.api_key" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("key", ["", " ", "s3cret ", "\ts3cret"])
def test_a_key_that_nobody_or_everybody_could_bring(key: str) -> None:
    """An empty key, as an unset variable leaves it, would open the server to whoever brings none."""
    with pytest.raises(InvalidOptionsError) as caught:
        load_config(Registry.discover(environ={}), environ={}, overrides={"server": {"api_key": ["good", key]}}, server=ServerSettings)
    assert "api_key" in str(caught.value) and "empty" in str(caught.value) and "s3cret" not in str(caught.value)

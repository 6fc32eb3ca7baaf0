"""What a server says of itself is kept, and what it does not say has a reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from octavo.bench.load.server_look import count, counted, identify_server
from octavo.bench.load.target import Target
from octavo.bench.reports.run_report import server_rows

CARD = {"id": "m", "owned_by": "vllm", "root": "org/m", "max_model_len": 4096}
METRICS = """# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 3.0
vllm:num_preemptions_total{engine="1"} 4.0
process_start_time_seconds 1000.5
"""


@contextmanager
def pages(answers: dict[str, str]) -> Iterator[Target]:
    """A server with these pages, and 404 for the rest."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "Stand-in/2.0", ""

        def do_GET(self) -> None:
            body = answers.get(self.path, "").encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Target(url=f"http://127.0.0.1:{server.server_address[1]}", model="m")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_another_server() -> None:
    """Its models' owner, root and context, and its version; that it does not describe its engine is said."""
    with pages({"/v1/models": json.dumps({"data": [{"id": "other"}, CARD]}), "/version": '{"version": "0.11.0"}'}) as target:
        found, engine = asyncio.run(identify_server(target))
    assert engine is None and found.unknown == {"engine": "/debug/engine answers 404"}
    assert (found.software, found.version, found.root, found.max_model_len) == ("vllm", "0.11.0", "org/m", 4096)
    assert server_rows(found)[1:] == [
        ["software", "vllm"],
        ["version", "0.11.0"],
        ["root", "org/m"],
        ["max_model_len", "4096"],
        ["engine", "not known: /debug/engine answers 404"],
    ]


def test_a_server_that_says_little() -> None:
    """Its header is better than nothing; each blank has a reason."""
    with pages({"/v1/models": json.dumps({"data": [{"id": "m"}]}), "/version": "[]", "/debug/engine": "{}"}) as target:
        found, engine = asyncio.run(identify_server(target))
    assert (engine, found.software, found.version) == (None, "Stand-in/2.0", "")
    assert found.unknown == {
        "version": "/version does not say",
        "root": "/v1/models does not say",
        "max_model_len": "/v1/models does not say",
        "engine": "/debug/engine is not what Octavo's server says there",
    }
    with pages({"/v1/models": "nonsense"}) as target:
        found, _ = asyncio.run(identify_server(target))
    assert found.unknown["root"] == "/v1/models is no list of models" and found.unknown["version"] == "/version answers 404"
    found, _ = asyncio.run(identify_server(target))  # it is gone
    assert found.unknown["software"].startswith("no connection: ")


def test_what_it_counts() -> None:
    """Summed over its engines; a server without metrics counts nothing that anybody sees."""
    with pages({"/metrics": METRICS}) as target:
        assert asyncio.run(count(target)) == {"preemptions": 7.0, "process_start_time_seconds": 1000.5}
    with pages({"/metrics": "<html>"}) as target:
        assert asyncio.run(count(target)) == {}
    with pages({}) as target:
        assert asyncio.run(count(target)) == {}


def test_what_was_counted_in_between() -> None:
    """A server that began anew did so once at least, and counts from 0; what it does not tell is None."""
    before, after = {"preemptions": 3.0, "process_start_time_seconds": 1.0}, {"preemptions": 8.0, "process_start_time_seconds": 1.0}
    unknown = {"failed steps": None, "steps out of memory": None}
    assert counted(before, after) == {"restarts": 0, "preemptions": 5, **unknown}
    assert counted(before, after | {"process_start_time_seconds": 2.0}) == {"restarts": 1, "preemptions": 8, **unknown}
    assert counted({}, {}) == {"restarts": None, "preemptions": None, **unknown}

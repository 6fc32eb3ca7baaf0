"""`octavo doctor`: the judgements, each with figures and knob, from canned metrics of a stand-in server; errors are clear and in time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.server import doctor
from octavo.server.doctor import UnreadableError, fetch, metrics_url
from tests.models import tiny
from tests.server.observed import run, serving

CALM = {
    "num_requests_running": 4,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.4,
    "num_preemptions_total": 3,
    "prefix_cache_queries_total": 10_000,
    "prefix_cache_hits_total": 6_000,
    "generation_tokens_total": 500,
}


def page(numbers: dict[str, float], prefix: str, engines: int = 1) -> str:
    """As a server shows them."""
    lines = []
    for name, number in numbers.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# HELP {prefix}{name} ...\n# TYPE {prefix}{name} {kind}")
        lines += [f'{prefix}{name}{{engine="{engine}",model_name="m"}} {number}' for engine in range(engines)]
    return "\n".join([*lines, "# TYPE other gauge", "other NaN", ""])


@pytest.fixture
def stand_in() -> Iterator[Callable[..., str]]:
    """Serve these pages one after the other; returns the address."""
    servers: list[ThreadingHTTPServer] = []

    def start(*pages: str, status: int = 200) -> str:
        left = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = (left.pop(0) if len(left) > 1 else left[0]).encode()
                self.send_response(status if self.path == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


CASES: dict[str, tuple[dict[str, float], dict[str, float], list[str], list[str]]] = {
    # what differs in the first and the second reading, the judgements in their order, words of the output
    "healthy": ({}, {"generation_tokens_total": 510}, [], ["healthy: 4 running, 0 waiting, 100.0 tokens/s, KV cache 40% in use"]),
    "threads are told": ({"compute_threads": 2}, {}, [], ["KV cache 40% in use, 2 CPU threads"]),
    "idle": ({"num_requests_running": 0, "kv_cache_usage_perc": 0}, {}, [], ["idle: 0 running"]),
    "few run and many wait": (
        {"num_requests_running": 3, "num_requests_waiting": 20, "kv_cache_usage_perc": 0.9},
        {"num_requests_waiting": 17},
        ["memory-bound"],
        ["3 running, 17 waiting, KV cache 90% in use", "gpu_memory_utilization", "kv_cache_memory", "max_model_len"],
    ),
    "a queue at one reading alone": ({"num_requests_waiting": 20}, {"num_requests_waiting": 0}, [], ["healthy"]),
    "all seats taken with room left": (
        {"num_requests_running": 8, "num_requests_waiting": 9, "max_num_seqs": 8},
        {},
        ["seats taken"],
        ["8 running, 9 waiting", "raise max_num_seqs (now 8)"],
    ),
    "all seats taken and no room": (
        {"num_requests_running": 8, "num_requests_waiting": 9, "max_num_seqs": 8, "kv_cache_usage_perc": 0.85},
        {},
        ["memory-bound"],
        ["max_model_len"],
    ),
    "preemptions rise": (
        {},
        {"num_preemptions_total": 10},
        ["over-committed"],
        ["7 preemptions in 0.1 s with 4 running", "lower max_num_seqs"],
    ),
    "always full": ({"kv_cache_usage_perc": 0.99}, {"kv_cache_usage_perc": 0.96}, ["saturated"], ["KV cache 96% in use", "scale out"]),
    "full once": ({"kv_cache_usage_perc": 0.99}, {"kv_cache_usage_perc": 0.5}, [], ["healthy"]),
    "few hits lately": (
        {},
        {"prefix_cache_queries_total": 12_000, "prefix_cache_hits_total": 6_020},
        ["low prefix hit rate"],
        ["20 of 2000 prompt tokens found (1.0%) between the readings", "enable_prefix_caching"],
    ),
    "few hits ever": (
        {"prefix_cache_hits_total": 100},
        {"prefix_cache_queries_total": 10_010},
        ["low prefix hit rate"],
        ["100 of 10010 prompt tokens found (1.0%) since the start"],
    ),
    "no prefix cache": ({"prefix_cache_queries_total": 0, "prefix_cache_hits_total": 0}, {}, [], ["healthy"]),
    "started anew": ({}, {"num_preemptions_total": 0, "generation_tokens_total": 20}, [], ["200.0 tokens/s"]),
    "out of memory": (
        {"out_of_memory_steps_total": 1},
        {"out_of_memory_steps_total": 2},
        ["out of memory"],
        ["1 steps ran out", "lower gpu_memory"],
    ),
    "all at once": (
        {"num_requests_waiting": 50, "kv_cache_usage_perc": 1.0},
        {"num_preemptions_total": 4},
        ["memory-bound", "over-committed", "saturated"],
        ["busy: 4 running, 50 waiting"],
    ),
}


@pytest.mark.parametrize("prefix", ["octavo:", "vllm:"])
@pytest.mark.parametrize("case", CASES)
def test_judgements(case: str, prefix: str, stand_in: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """The right ones and no other, with figures and the knob; 1 if there are any, else 0; of either server."""
    first, then, judgements, words = CASES[case]
    url = stand_in(page(CALM | first, prefix), page(CALM | first | then, prefix))
    assert main(["doctor", url, "--interval", "0.1"]) == bool(judgements)
    out = capsys.readouterr().out
    assert [line.partition(":")[0] for line in out.splitlines()[1:] if line and not line.startswith(" ")] == judgements
    assert all(word in out for word in words), out


def test_older_names_and_several_engines(stand_in: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's older names count as well; engines are summed, and of their pools the fullest is shown."""
    renamed = {
        name.replace("kv_cache_usage", "gpu_cache_usage").replace("prefix_cache", "gpu_prefix_cache"): number
        for name, number in CALM.items()
    }
    renamed |= {"gpu_cache_usage_perc": 0.97, "gpu_prefix_cache_hits_total": 0}
    url = stand_in(page(renamed, "vllm:", engines=2))
    assert main(["doctor", f"{url}/v1/", "--interval", "0.01"]) == 1
    out = capsys.readouterr().out
    assert "8 running" in out and "saturated" in out and "97%" in out and "0 of 20000 prompt tokens" in out


@pytest.mark.parametrize(
    "text, status, words",
    [
        ("", 200, "holds no metrics of Octavo or vLLM"),
        ("python_info 1\n", 200, "octavo:num_requests_running"),
        ("<html>{no metrics}</html>\n", 200, "holds no metrics"),
        ("", 401, "answers 401"),
        ("", 500, "answers 500"),
    ],
)
def test_what_is_no_metrics_is_said(
    text: str, status: int, words: str, stand_in: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and one line that says what came instead."""
    assert main(["doctor", stand_in(text, status=status), "--interval", "0.01"]) == 2
    error = capsys.readouterr().err
    assert words in error and "/metrics" in error and error.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://somewhere", "http://", "http://h:port", "", "http://h:99999"])
def test_a_bad_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked."""
    assert main(["doctor", url]) == 2
    assert "is no address of a server: give one such as http://localhost:8000" in capsys.readouterr().err


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """A port that is closed is told with its address."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["doctor", f"localhost:{port}"]) == 2
    assert f"http://localhost:{port}/metrics cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("sends", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\na", b"drip", b"drip headers", b"nonsense\r\n\r\n"])
def test_a_server_that_does_not_answer_holds_nobody_up(sends: bytes) -> None:
    """Silence, an answer that stops, one that comes byte by byte for ever, and one that is none: an error within the time."""
    stop = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with closing(connection):
                connection.recv(4096)
                if b"drip" in sends:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n" + b"\r\n" * (sends == b"drip"))
                    while not stop.wait(0.02):
                        connection.sendall(b"x")
                else:
                    connection.sendall(sends)
                    if b"nonsense" not in sends:
                        stop.wait(10)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(UnreadableError, match="cannot be read" if b"nonsense" in sends else "did not answer within 0.3 s"):
            fetch(f"http://127.0.0.1:{server.getsockname()[1]}/metrics", timeout_s=0.3)
        stop.set()
        thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("given", ["h:1", "http://h:1", "http://h:1/", "http://h:1/metrics", "http://h:1/v1", "h:1/v1/"])
def test_addresses_are_taken_in_any_usual_form(given: str) -> None:
    """Base URLs of clients included."""
    assert metrics_url(given) == "http://h:1/metrics"


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan", "1e9"])
def test_an_interval_is_checked(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By argparse, with the range."""
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "h:1", f"--interval={interval}"])
    assert stopped.value.code == 2 and "between 0 and 3600" in capsys.readouterr().err


def test_our_own_metrics_are_understood() -> None:
    """What /metrics says is what the doctor reads."""
    folder: Path = tiny("llama_gqa")

    async def test() -> None:
        async with serving(folder, server={"metrics_prefix": "vllm"}) as server:
            await server.complete([1, 2, 3])
            text = (await server.client.get("/metrics")).text
            reading = doctor.parse(text, url="here")
            assert reading.prefix == "vllm:" and reading.usage == 0 and reading.total("max_num_seqs") == 8
            assert reading.total("generation_tokens_total") == 8
            diagnosis = doctor.diagnose(reading, reading, interval_s=1)
            assert diagnosis.summary.startswith("idle: 0 running") and not diagnosis.findings

    run(test())

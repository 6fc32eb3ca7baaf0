"""`octavo serve` as a process: signals, exit status, what a dead disk, a hanging plugin and a network that is not there do to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from octavo.bench.load.process import ServerProcess
from octavo.core.testing.fake_plugins import write_package

BOUND = 60.0
TINY = ["--device", "cpu", "--dtype", "float32", "--num-kv-slots", "2048", "--max-model-len", "256"]

GUARD = """
import socket
def refuse(self, address, *rest):
    with open({log!r}, "a") as log:
        print("connect", address, file=log)
    raise OSError("no network in this test")
def resolve(host, *rest, **more):
    if host in (None, "localhost") or host.replace(".", "").isdigit():
        return found(host, *rest, **more)
    with open({log!r}, "a") as log:
        print("resolve", host, file=log)
    raise OSError("no network in this test")
found = socket.getaddrinfo
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = resolve
"""

FAULTY = """
import time
from octavo.core.descriptors import SchedulerPlugin
from octavo.core.hookspecs import hookimpl
from octavo.core.scheduling import Scheduler

class Faulty(Scheduler):
    chunking = True
    steps = 0

    def schedule(self, now):
        self.steps += 1
        if self.steps > 4:
            {fault}
        plan = self.plan()
        for request in list(self.running):
            self.grow(plan, request)
        for request in self.queue():
            if self.admit(plan, request):
                self.grow(plan, request)
        return plan.build()

@hookimpl
def octavo_schedulers():
    return [SchedulerPlugin(name="faulty", summary="fails", chunking=True, build=lambda options, kv: Faulty(options, kv))]
"""

LOADING = """
import threading
from pathlib import Path
from octavo.core.descriptors import SchedulerPlugin
from octavo.core.hookspecs import hookimpl

def build(options, kv):
    import torch
    torch.ones(512, 512) @ torch.ones(512, 512)
    Path({begun!r}).touch()
    while True:
        torch.ones(1500, 1500) @ torch.ones(1500, 1500)

@hookimpl
def octavo_schedulers():
    return [SchedulerPlugin(name="loading", summary="takes for ever", chunking=True, build=build)]
"""

BUSY = "import torch; [torch.ones(1500, 1500) @ torch.ones(1500, 1500) for _ in range(10**9)]"
CHOICE = 'scheduler.plugin="faulty"'
Start = Callable[..., ServerProcess]


@pytest.fixture
def start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a server around the tiny model; `modules` of its own are installed for it. It is gone after the test."""
    processes: list[ServerProcess] = []

    def make(*arguments: str, **modules: str) -> ServerProcess:
        if modules:
            site = tmp_path / "site"
            write_package(site, "for-a-test", **modules)
            monkeypatch.setenv("PYTHONPATH", str(site))
        processes.append(ServerProcess(["--model", str(folder), *TINY, *arguments]))
        return processes[-1]

    yield make
    for process in processes:
        process.__exit__(None, None, None)


def _obey_ctrl_c() -> None:
    """Shells start what runs in the background with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def complete(url: str, **fields: Any) -> httpx2.Response:
    body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, **fields}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=BOUND)


@pytest.mark.slow
def test_idle_full_disk_no_network_and_a_signal_in_mid_stream(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a local model nothing is connected to or looked up, idle it uses no CPU, and SIGTERM lets a stream end, though no log fits on
    the disk."""
    log = tmp_path / "network"
    site = tmp_path / "guard"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GUARD.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    server = start("--log-file", "/dev/full", "--drain-timeout-s", str(BOUND))
    assert complete(server.url, max_tokens=4).status_code == 200
    process = psutil.Process(server.process.pid)
    time.sleep(0.5)
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
    assert float(httpx2.get(f"{server.url}/metrics").text.partition("octavo:log_lines_dropped_total{")[2].partition("} ")[2].split()[0]) > 0
    body = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=BOUND) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(BOUND) == 0
    assert not log.exists(), log.read_text()


@pytest.mark.slow
def test_the_second_signal_ends_it_at_once(start: Start) -> None:
    """Though a request runs that would have a minute; the status says which signal."""
    server = start("--drain-timeout-s", "60", "--set", CHOICE, slow=FAULTY.format(fault="time.sleep(0.5)"))
    body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=BOUND) as answer:
        lines = answer.iter_lines()  # kept: one that is dropped hangs up, and then nothing runs that the server would wait for
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        while httpx2.get(f"{server.url}/ready").status_code != 503:
            time.sleep(0.05)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("time.sleep(600)", "a step has taken more than step_timeout_s = 1 s"), ("raise ZeroDivisionError('wrong')", "wrong")],
)
def test_a_plugin_that_hangs_or_raises_ends_the_process(start: Start, fault: str, reason: str) -> None:
    """Whoever waits is told, /health says why, and the status is 1: an init system starts it again."""
    server = start("--step-timeout-s", "1", "--set", CHOICE, faulty=FAULTY.format(fault=fault))
    statuses = []
    while not statuses or statuses[-1] == 500:
        answer = complete(server.url, max_tokens=50)
        statuses.append(answer.status_code)
    assert statuses[-1] == 503 and reason in answer.json()["error"]["message"]
    health = httpx2.get(f"{server.url}/health")
    assert health.status_code == 503 and reason in health.json()["reason"]
    assert server.process.wait(BOUND) == 1
    assert reason in server.log


@pytest.mark.slow
def test_what_cannot_start_says_why_and_ends(folder: Path) -> None:
    """A port in use, a model that is not there, a setting that is none: one message, no traceback, status 2 or 1, nothing loaded."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, message in (
            (["--model", str(folder), "--port", port], f"cannot listen at 127.0.0.1, port {port}"),
            (["--model", "/no/such/model", "--port", "0"], "/no/such/model"),
            (["--model", str(folder), "--port", "0", "--max-num-seqs", "0"], "max_num_seqs"),
            (["--model", str(folder), "--port", "0", "--log-file", "/no/such/folder/log"], "/no/such/folder/log"),
        ):
            done = subprocess.run([sys.executable, "-m", "octavo", "serve", *arguments], capture_output=True, text=True, timeout=BOUND)
            assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_is_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """The process ends at once with 128 + the signal and without a word, though its other thread is inside native code."""
    begun, site = tmp_path / "begun", tmp_path / "site"
    write_package(site, "for-a-test", loading=LOADING.format(begun=str(begun)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    command = [sys.executable, "-m", "octavo", "serve", "--model", str(folder), *TINY, "--port", "0", "--set", 'scheduler.plugin="loading"']
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_obey_ctrl_c) as process:
        try:
            end = time.monotonic() + BOUND
            while not begun.exists():
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(number)
            _, said = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in said and "terminate called" not in said, said


@pytest.mark.slow
def test_a_signal_while_a_step_hangs(start: Start) -> None:
    """Who waits is told, and the process ends with 0, though its other thread is inside native code."""
    server = start("--drain-timeout-s", "0.5", "--set", CHOICE, faulty=FAULTY.format(fault=BUSY))
    body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=BOUND) as answer:
        lines = answer.iter_lines()
        next(lines)
        while httpx2.get(f"{server.url}/load").json()["step_age_s"] < 0.5:
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert server.process.wait(BOUND) == 0, server.log
    assert rest[-1] == "data: [DONE]" and "error" in json.loads(rest[-2].removeprefix("data: ")), rest[-2:]
    assert "terminate called" not in server.log


@pytest.mark.slow
def test_a_step_that_hangs_ends_streams_with_an_error(start: Start) -> None:
    """The other form of an answer: an error event with the reason before [DONE], then exit status 1."""
    server = start("--step-timeout-s", "1", "--set", CHOICE, faulty=FAULTY.format(fault=BUSY))
    body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=BOUND) as answer:
        rest = [line for line in answer.iter_lines() if line]
    assert rest[-1] == "data: [DONE]" and "step_timeout_s = 1 s" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
    assert server.process.wait(BOUND) == 1

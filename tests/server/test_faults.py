"""Faults injected on purpose, each with the outcome that docs/explanation/server-faults.md promises.

Each server has an engine of its own, real sockets, and its life's end: `Site.ended` is the exit status that its process would have.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.core.engine_loop import MOST_FAILURES
from octavo.core.errors import ConfigError, EngineStuckError, OutOfMemoryError
from octavo.core.plan import BatchPlan
from octavo.core.text.detokenizer import IncrementalDetokenizer
from octavo.server import lifecycle
from octavo.server.logs import DroppingHandler
from octavo.server.served import Served
from octavo.server.settings import ServerSettings
from tests.server.conftest import BOUND, ENGINE, MODEL, Loop, assert_empty, opened


class Site:
    """A server with an engine of its own behind a real socket."""

    def __init__(self, loop: Loop, folder: Path, settings: dict[str, Any], engine: dict[str, Any]) -> None:
        self.loop = loop
        self.llm = loop.run(opened(model=folder, **ENGINE | engine))
        self.here = Served(self.llm, ServerSettings(**settings), (MODEL,))
        self.lifecycle = lifecycle.Lifecycle(self.here)
        listener = lifecycle.listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self._life = asyncio.run_coroutine_threadsafe(self.lifecycle.run(listener), loop.loop)
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=BOUND)
        self.until(lambda: self.lifecycle._server.started)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx2.Response:
        """A greedy completion."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.http.post("/v1/completions", json=body)

    def text(self, **fields: Any) -> str:
        """Its text, which must come."""
        answer = self.complete(**fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def signal(self) -> None:
        """As the process would be signalled."""
        self.lifecycle.signalled(signal.SIGTERM)

    def ended(self) -> int:
        """Wait for its end; the exit status."""
        return self._life.result(BOUND)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it, within a bound."""
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)

    @contextmanager
    def gathering(self, count: int) -> Iterator[None]:
        """The engine takes what is sent inside only when it is so many requests, and all of them between the same two steps."""
        release = threading.Event()
        self.llm.engine_loop.post(lambda engine: release.wait(BOUND) and None)
        try:
            yield
            self.until(lambda: len(self.llm._open) == count)
        finally:
            release.set()

    def close(self) -> None:
        """For tests that leave it alive."""
        self.http.close()
        self.lifecycle._server.should_exit = True
        self.ended()


NewSite = Callable[..., Site]


@pytest.fixture
def new_site(loop: Loop, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewSite]:
    """Make a server. It ends when the test ends, if it did not before."""
    monkeypatch.setattr(lifecycle, "LINGER_S", 0.3)
    sites: list[Site] = []

    def make(engine: dict[str, Any] | None = None, **settings: Any) -> Site:
        sites.append(Site(loop, folder, settings, engine or {}))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


class Gate:
    """Lets steps through one by one. `plans`: those that came to it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.plans: list[BatchPlan] = []
        self._open = threading.Semaphore(0)
        self._wide = False
        submit = llm.built.engine.runner.submit

        def waiting(plan: BatchPlan) -> Any:
            self.plans.append(plan)
            assert self._wide or self._open.acquire(timeout=BOUND)
            return submit(plan)

        llm.built.engine.runner.submit = waiting  # type: ignore[method-assign]

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._open.release()

    def open(self) -> None:
        self._wide = True
        self._open.release()


def failing(llm: AsyncLLM, wrong: Callable[[BatchPlan], Exception | None]) -> None:
    """Steps for whose plan `wrong` has an error end with it."""
    submit = llm.built.engine.runner.submit

    def checked(plan: BatchPlan) -> Any:
        if error := wrong(plan):
            raise error
        return submit(plan)

    llm.built.engine.runner.submit = checked  # type: ignore[method-assign]


def streamed(site: Site, **fields: Any) -> list[str]:
    """All lines of a stream that hold data."""
    answer = site.complete(stream=True, **fields)
    assert answer.status_code == 200
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


# ------------------------------------------------------------------------ plugins


def test_a_step_that_fails_costs_its_requests_alone(new_site: NewSite) -> None:
    """A plugin raises once: who waits gets 500 with the reason, who reads an error event and [DONE] (fault 42); the next is answered."""
    site = new_site()
    scheduler, calls = site.llm.built.engine.scheduler, list[float]()

    def late(now: float) -> BatchPlan:
        calls.append(now)
        if len(calls) == 60:  # the stream has begun long ago, or it would be a 500 too
            raise ZeroDivisionError("the plugin is wrong")
        return schedule(now)

    schedule, scheduler.schedule = scheduler.schedule, late  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        with site.gathering(2):
            whole, stream = pool.submit(site.complete, max_tokens=90), pool.submit(streamed, site, max_tokens=90)
        answer, lines = whole.result(), stream.result()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "its step failed: the plugin is wrong")
    assert '"message":"its step failed: the plugin is wrong"' in lines[-2] and lines[-1] == "[DONE]"
    assert site.complete().status_code == 200 and site.http.get("/health").status_code == 200
    assert_empty(site.llm)


@pytest.mark.parametrize("on_death", ["exit", "stay"])
def test_a_plugin_that_always_fails_ends_the_server(new_site: NewSite, on_death: str) -> None:
    """The engine dies: /health is 503 with the reason, new requests are 503, and the process ends with 1 unless told to stay (fault 43)."""
    site = new_site(on_death=on_death)
    failing(site.llm, lambda plan: ZeroDivisionError("the plugin is wrong"))
    statuses = [site.complete().status_code for _ in range(MOST_FAILURES)]
    last = site.complete()
    assert statuses == [500] * MOST_FAILURES
    assert last.status_code == 503 and last.json()["error"]["message"] == "the engine has stopped: the plugin is wrong"
    health = site.http.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "dead", "reason": "the plugin is wrong"})
    assert site.http.get("/ready").status_code == 503
    assert site.complete().json()["error"]["code"] == "engine_stopped"
    if on_death == "stay":
        time.sleep(2 * lifecycle.LINGER_S)
        assert site.http.get("/health").status_code == 503
        site.signal()
    assert site.ended() == (1 if on_death == "exit" else 0)


def test_whoever_waits_hears_of_the_death(new_site: NewSite) -> None:
    """Requests in the middle of their answers: an error event, or 503, none is left waiting (fault 43)."""
    site = new_site(on_death="stay")
    gate = Gate(site.llm)

    def stuck(now: float) -> BatchPlan:
        raise EngineStuckError("nothing can be planned")

    with ThreadPoolExecutor(2) as pool:
        with site.gathering(2):
            whole, stream = pool.submit(site.complete, max_tokens=50), pool.submit(streamed, site, max_tokens=50)
        gate.let(4)
        site.until(lambda: len(gate.plans) == 5)
        site.llm.built.engine.scheduler.schedule = stuck  # type: ignore[method-assign]
        gate.open()
        assert whole.result().status_code == 503
        lines = stream.result()
    assert "the engine has stopped: nothing can be planned" in lines[-2] and lines[-1] == "[DONE]"
    site.signal()
    assert site.ended() == 0


# ------------------------------------------------------------------------- memory


def test_out_of_memory_preempts_and_tries_again(new_site: NewSite, offline: LLM) -> None:
    """Steps of more than two requests run out of memory: everybody gets the right answer all the same, and it is counted."""
    site = new_site()
    failing(site.llm, lambda plan: OutOfMemoryError("no memory") if len(plan.chunks) > 2 else None)
    prompts = [f"prompt {number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        with site.gathering(6):
            asked = [pool.submit(site.text, prompt=prompt) for prompt in prompts]
        texts = [one.result() for one in asked]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert texts == [answer.outputs[0].text for answer in offline.generate(prompts, params, use_tqdm=False)]
    assert site.llm.built.engine.relief.count > 0
    assert re.search(r"^octavo:out_of_memory_steps_total\{.*\} [1-9]", site.http.get("/metrics").text, re.MULTILINE)
    assert_empty(site.llm)


def test_what_needs_too_much_memory_alone_fails_alone(new_site: NewSite) -> None:
    """500 with the reason; the next request is answered."""
    site = new_site()
    failing(site.llm, lambda plan: OutOfMemoryError("no memory") if any(c.sequence.request.user == "big" for c in plan.chunks) else None)
    answer = site.complete("a" * 150, user="big")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "its step failed: no memory")
    assert site.complete().status_code == 200
    assert_empty(site.llm)


# ---------------------------------------------------------------------- tokenizer


def test_a_tokenizer_that_fails_on_a_prompt_fails_it_alone(new_site: NewSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 for that prompt, without what the tokenizer said; another one is answered at the same time."""
    site = new_site()
    tokenizer = site.llm.prompts.tokenizer
    encode = tokenizer.encode

    def broken(text: str, **options: Any) -> list[int]:
        if "poison" in text:
            raise RuntimeError("the tokenizer is wrong")
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", broken)
    assert site.complete("poison").status_code == 500
    assert site.complete("hello").status_code == 200
    assert_empty(site.llm)


def test_a_tokenizer_that_fails_on_an_answer_fails_it_alone(new_site: NewSite, offline: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step for many: that one gets an error, the others their text."""
    site = new_site()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = ["one", "two", "three"]
    answers = [answer.outputs[0] for answer in offline.generate(prompts, params, use_tqdm=False)]
    only = next(token for token in answers[1].token_ids if token not in answers[0].token_ids + answers[2].token_ids)
    push = IncrementalDetokenizer.push

    def broken(self: IncrementalDetokenizer, token_id: int) -> str:
        if token_id == only:
            raise RuntimeError("the tokenizer is wrong")
        return push(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "push", broken)
    with ThreadPoolExecutor(3) as pool:
        with site.gathering(3):
            asked = [pool.submit(site.complete, prompt) for prompt in prompts]
        first, wrong, third = (one.result() for one in asked)
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (500, "its tokens cannot be turned into text: the tokenizer is wrong")
    assert [answer.json()["choices"][0]["text"] for answer in (first, third)] == [answers[0].text, answers[2].text]
    assert_empty(site.llm)


# ------------------------------------------------------------------- disk and clock


def test_a_full_disk_costs_lines_of_the_log_alone(new_site: NewSite) -> None:
    """Lines that cannot be written are counted; requests are answered."""
    site = new_site()
    logger, before = logging.getLogger("octavo.server"), DroppingHandler.num_dropped
    full = open("/dev/full", "w")  # noqa: SIM115
    handler = DroppingHandler(full)
    logger.addHandler(handler)
    try:
        for _ in range(3):
            logger.warning("a line")
        assert site.complete().status_code == 200
    finally:
        logger.removeHandler(handler)
        with pytest.raises(OSError, match="No space left"):
            full.close()
    assert DroppingHandler.num_dropped >= before + 3
    dropped = re.search(r"^octavo:log_lines_dropped_total\{.*\} (\S+)$", site.http.get("/metrics").text, re.MULTILINE)
    assert dropped is not None and float(dropped[1]) == DroppingHandler.num_dropped


def test_a_jump_of_the_clock_changes_nothing(new_site: NewSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by days while requests with timeouts run: none of them ends early or late, no step counts as hanging."""
    site = new_site(step_timeout_s=30.0)
    gate, now = Gate(site.llm), time.time
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(site.complete, timeout_s=50.0)
        site.until(lambda: len(gate.plans) == 1)
        for jump in (10 * 86400, -10 * 86400):
            monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
            gate.let(2)
            time.sleep(0.1)
        gate.open()
        answer = asked.result()
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert site.http.get("/health").status_code == 200
    assert_empty(site.llm)


# ------------------------------------------------------------------------- the end


def test_a_signal_lets_running_requests_finish(new_site: NewSite) -> None:
    """/ready and new requests are 503, what runs is answered in full, and the status is 0."""
    site = new_site(drain_timeout_s=BOUND)
    expected = site.text(max_tokens=30)
    gate = Gate(site.llm)
    with ThreadPoolExecutor(2) as pool:
        with site.gathering(2):
            whole, stream = pool.submit(site.text, max_tokens=30), pool.submit(streamed, site, max_tokens=30)
        site.signal()
        site.until(lambda: site.http.get("/ready").status_code == 503)
        refused = site.complete()
        assert (refused.status_code, refused.json()["error"]["code"], "Retry-After" in refused.headers) == (503, "shutting_down", True)
        assert site.http.get("/health").status_code == 200
        gate.open()
        assert whole.result() == expected
        assert stream.result()[-1] == "[DONE]"
    assert site.ended() == 0


def test_what_does_not_finish_in_time_is_ended(new_site: NewSite) -> None:
    """After drain_timeout_s: 503 or an error event, never silence, and the status is 0."""
    site = new_site(drain_timeout_s=0.2)
    submit = site.llm.built.engine.runner.submit

    def slow(plan: BatchPlan) -> Any:
        time.sleep(0.05)
        return submit(plan)

    site.llm.built.engine.runner.submit = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        with site.gathering(2):
            whole, stream = pool.submit(site.complete, max_tokens=200), pool.submit(streamed, site, max_tokens=200)
        site.signal()
        assert whole.result().status_code == 503
        lines = stream.result()
    assert '"code":"aborted"' in lines[-2] and lines[-1] == "[DONE]"
    assert site.ended() == 0


# -------------------------------------------------------------------------- clients


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_who_is_gone_costs_two_steps_at_most(new_site: NewSite, stream: bool) -> None:
    """Streaming or not: its request is ended and its blocks come back (fault 11)."""
    site = new_site()
    gate = Gate(site.llm)
    gate.let(3)
    with socket.create_connection(("127.0.0.1", site.port)) as client:
        body = b'{"prompt": "hello", "max_tokens": 200, "ignore_eos": true, "stream": %s}' % (b"true" if stream else b"false")
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        site.until(lambda: len(gate.plans) == 4)
    site.until(lambda: not site.llm._open)
    gate.open()
    assert_empty(site.llm)
    assert len(gate.plans) - 4 <= 1


def test_clients_who_never_finish_their_request_are_hung_up_on(new_site: NewSite, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing at all, half a head, half a body: closed after client_timeout_s; others are answered meanwhile, however long it takes."""
    site = new_site(client_timeout_s=0.4)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    slow = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(3)]
    try:
        slow[1].sendall(head)
        slow[2].sendall(head + b'Content-Length: 100\r\n\r\n{"prompt"')
        gate = Gate(site.llm)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(site.complete)
            for client in slow:
                client.settimeout(BOUND)
                with pytest.raises(ConnectionResetError):
                    if not client.recv(1):
                        raise ConnectionResetError
            gate.open()
            assert asked.result().status_code == 200
    finally:
        for client in slow:
            client.close()
    assert "kept the server waiting for 0.4 s" in caplog.text
    site.until(lambda: site.here.num_active == 0)


def test_a_client_who_stops_reading_is_hung_up_on(new_site: NewSite) -> None:
    """Its answer is far too large for the socket's buffers: after client_timeout_s the connection is closed."""
    site = new_site(client_timeout_s=0.4)
    connections = site.lifecycle._server.server_state.connections
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", site.port))
        body = b'{"prompt": "%s", "return_token_strs": true}' % (b"a" * 1_000_000)
        client.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        site.until(lambda: any(connection.flow.write_paused for connection in connections))
        site.until(lambda: not connections)


def test_a_slow_reader_who_reads_on_gets_everything(new_site: NewSite) -> None:
    """Pauses that are shorter than the limit do no harm, whatever they add up to."""
    site = new_site(client_timeout_s=0.4)
    expected, text = site.text(max_tokens=100), ""
    body = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    with site.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line not in ("", "data: [DONE]"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                time.sleep(0.01)
    assert text == expected


def test_a_body_without_end_is_refused(new_site: NewSite) -> None:
    """413 as soon as it is too long, declared or not; the server does not read on."""
    site = new_site(max_body_bytes=2048)

    def endless() -> Iterator[bytes]:
        for _ in range(100_000):
            yield b"x" * 1024

    for content in (b"x" * 10_000, endless()):
        try:
            status = site.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}).status_code
        except (httpx2.WriteError, httpx2.ReadError):
            status = 413  # it hung up on a client who did not stop to send
        assert status == 413
    assert site.complete().status_code == 200


def test_many_connections(new_site: NewSite) -> None:
    """Hundreds that say nothing do not keep anybody else waiting."""
    site = new_site()
    idle = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(300)]
    try:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda number: site.complete(f"prompt {number}").status_code, range(48)))
    finally:
        for client in idle:
            client.close()
    assert answers == [200] * 48
    assert_empty(site.llm)


# ---------------------------------------------------------------------------- start


def test_a_port_in_use_is_told() -> None:
    """With the address, the reason and what to do; before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"^cannot listen at 127.0.0.1, port {port}: .* in use; choose another with --host and --port$"
        ):
            lifecycle.listen("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 99999), ("256.1.1.1", 80)])
def test_an_address_that_is_none_is_told(host: str, port: int) -> None:
    """No traceback."""
    with pytest.raises(ConfigError, match="cannot listen at"):
        lifecycle.listen(host, port)


def test_nothing_waits_by_the_wall_clock() -> None:
    """Core and server take times from monotonic clocks: the wall clock is read by who shows it to people, or names files by it."""
    root = Path(__file__).parents[2]
    readers = {
        path.relative_to(root).as_posix()
        for folder in ("core", "server", "plugins", "src")
        for path in (root / folder).rglob("*.py")
        if re.search(r"\btime\.time\(|datetime\.(now|utcnow)\(", path.read_text())
    }
    shown = {"server/served.py", "server/openai/chat_answer.py", "server/openai/completions_answer.py", "core/text/chat_template.py"}
    named = {"core/sources/cache.py", "src/octavo/cli/bench/saving.py"}
    assert readers - shown == named

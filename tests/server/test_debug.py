"""GET /debug/kv, /debug/flight, /load and POST /reset_prefix_cache: what they say agrees with the engine, and they show no text."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.core.engine import Engine
from octavo.core.errors import OutOfMemoryError
from octavo.core.kv import BlockState
from octavo.server import block_watch, flight, served
from octavo.server.debug import Flight, KVPool, free_runs
from octavo.server.lifecycle import Lifecycle
from octavo.server.load import Load
from tests.models import tiny
from tests.server.observed import Running, die, run, serving

ROUTES = [("GET", "/load"), ("GET", "/debug/kv"), ("GET", "/debug/flight"), ("GET", "/debug/engine"), ("POST", "/reset_prefix_cache")]


@pytest.fixture(scope="session")
def folder() -> Path:
    """A folder of the tiny model."""
    return tiny("llama_gqa")


async def pool(server: Running) -> KVPool:
    """GET /debug/kv, by its documented form."""
    return KVPool.model_validate_json((await server.client.get("/debug/kv")).text)


async def engine_says(server: Running) -> list[tuple[int, list[str], str]]:
    """The same from a snapshot."""
    states: list[BlockState] = await server.here.llm.call(lambda engine: engine.kv.snapshot())
    return [(state.start, sorted(state.owners), state.key[:12]) for state in states]


async def agree(server: Running) -> bool:
    """The route and a snapshot, taken with no step in between, show the same."""
    held, go_on = threading.Event(), threading.Event()

    def pause(_: Engine) -> None:
        held.set()
        go_on.wait(20)

    loop = server.here.llm.engine_loop
    loop.post(pause)
    await asyncio.to_thread(held.wait, 20)
    both = asyncio.gather(pool(server), engine_says(server))
    while sum(action.__qualname__.startswith("AsyncLLM.call.") for action in list(loop._inbox)) < 2:  # requests may come beside them
        await asyncio.sleep(0.001)
    go_on.set()
    shown, said = await both
    assert [(b.start, sorted(b.owners), b.key) for b in shown.blocks] == said
    held_slots = sum(b.count for b in shown.blocks if b.state != "cached")
    return held_slots == shown.usage["filled"] + shown.usage["held"]


@pytest.mark.parametrize("allocator", ["prefix", "paged", "contiguous"])
def test_the_pool_is_shown_as_it_is(folder: Path, allocator: str) -> None:
    """From the first look on, while requests come, share, end and are aborted, every look agrees with the allocator's own books."""

    async def test() -> None:
        settings = {"allocator": allocator, **({"block_size": None} if allocator == "contiguous" else {})}
        async with serving(folder, **settings) as server:
            engine = server.here.llm.built.engine
            await server.complete(list(range(12)))
            work = [asyncio.create_task(server.complete([*range(12), i], max_tokens=16, n=2, temperature=1.0)) for i in range(3)]
            while not server.here.llm.built.engine.requests:
                await asyncio.sleep(0.001)
            for look in range(6):
                assert await agree(server)
                if look == 2:
                    work[0].cancel()
                    await asyncio.gather(work[0], return_exceptions=True)
                    while len(engine.requests) == 3:  # its abort is on the way, and would stand between a look and a snapshot
                        await asyncio.sleep(0.001)
            await asyncio.gather(*work, return_exceptions=True)
            await server.idle()
            last = asyncio.create_task(server.complete([9, 9, 9], max_tokens=100))
            while not server.here.llm.built.engine.requests:
                await asyncio.sleep(0.001)
            assert await agree(server)
            last.cancel()  # no step follows
            await asyncio.gather(last, return_exceptions=True)
            await server.idle()
            shown = await pool(server)
            assert [(b.start, sorted(b.owners), b.key) for b in shown.blocks] == await engine_says(server)
            assert shown.capacity == engine.kv.capacity and shown.layout == engine.kv.layout
            assert sum(b.count for b in shown.blocks) + sum(count for _, count in shown.free) == shown.capacity
            assert sum(b.count for b in shown.blocks if b.state == "cached") == shown.usage["cached"]
            assert all(b.state == "cached" for b in shown.blocks) and bool(shown.blocks) == (allocator == "prefix")
            assert all(len(b.key) == 12 for b in shown.blocks)

    run(test())


def test_live_blocks_have_their_owners(folder: Path) -> None:
    """In the middle of a run: two samples of one prompt share its full blocks; the owners are the engine's sequences."""

    async def test() -> None:
        async with serving(folder) as server:
            task = asyncio.create_task(server.complete(list(range(12)), max_tokens=100, n=2, temperature=1.0, request_id="mine"))
            while len(server.reports) < 3:
                await asyncio.sleep(0.001)
            shown = await pool(server)
            shared = [block for block in shown.blocks if block.state == "shared"]
            assert len(shared) == 3 and all(len(block.owners) == 2 and block.key for block in shared)
            assert all(owner.startswith("mine") for block in shown.blocks for owner in block.owners)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.idle()

    run(test())


def test_nobody_looks_nobody_pays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are off before the first look and again some time after the last; the next look begins anew and is right."""

    async def test() -> None:
        async with serving(folder) as server:
            kv = server.here.llm.built.engine.kv
            await server.complete(list(range(12)))
            assert not kv.observed and not any(report.events for report in server.reports)
            await pool(server)
            assert kv.observed
            await server.complete([1, *range(12)])
            assert kv.observed and any(report.events for report in server.reports)
            monkeypatch.setattr(block_watch, "IDLE_S", 0.0)
            await server.complete([2, *range(12)])
            at = len(server.reports)
            await server.complete([3, *range(12)])
            assert not kv.observed and not any(report.events for report in server.reports[at:])
            assert kv.drain_events() == []
            shown = await pool(server)
            assert [(b.start, sorted(b.owners), b.key) for b in shown.blocks] == await engine_says(server)

    run(test())


def test_free_slots_are_what_lies_between() -> None:
    """At both ends too."""
    assert free_runs([BlockState(4, 4), BlockState(8, 4), BlockState(16, 2)], 24) == [(0, 4), (12, 4), (18, 6)]
    assert free_runs([], 8) == [(0, 8)] and free_runs([BlockState(0, 8)], 8) == []


def test_load_and_reset(folder: Path) -> None:
    """Load counts what runs; a reset frees what is kept, and the next same prompt finds nothing."""

    async def test() -> None:
        async with serving(folder) as server:
            task = asyncio.create_task(server.complete([1, 2], max_tokens=100))
            while not server.reports:
                await asyncio.sleep(0.001)
            load = Load.model_validate_json((await server.client.get("/load")).text)
            assert (load.server_load, load.running, load.waiting) == (1, 1, 0) and load.kv_usage > 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.idle()
            await server.complete(list(range(20)))
            cached = server.here.llm.built.engine.kv.usage().cached
            freed = (await server.client.post("/reset_prefix_cache")).json()["freed_slots"]
            assert freed == cached > 0 and server.here.llm.built.engine.kv.usage().cached == 0
            again = (await server.complete(list(range(20)))).json()
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            load = Load.model_validate_json((await server.client.get("/load")).text)
            assert (load.server_load, load.running, load.waiting, load.kv_usage, load.step_age_s) == (0, 0, 0, 0, 0)

    run(test())


@pytest.mark.parametrize("method, path", ROUTES)
def test_they_want_the_key(method: str, path: str, folder: Path) -> None:
    """Where keys are set; with the key they answer. They are in the OpenAPI document, with their answers' form."""

    async def test() -> None:
        async with serving(folder, server={"api_key": ("secret",)}) as server:
            refused = await server.client.request(method, path)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            wrong = await server.client.request(method, path, headers={"Authorization": "Bearer secre"})
            assert wrong.status_code == 401
            assert (await server.client.request(method, path, headers={"Authorization": "Bearer secret"})).status_code == 200
            document = (await server.client.get("/openapi.json")).json()
            answer = document["paths"][path][method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
            assert answer["$ref"].rpartition("/")[2] in document["components"]["schemas"]
            assert (await server.client.get("/metrics")).status_code == 200, "metrics are open, as probes are"

    run(test())


def test_flight_shows_the_last_steps(folder: Path) -> None:
    """As many as are kept, the newest last, with the rows' lengths, and nothing of what was said."""

    async def test() -> None:
        async with serving(folder, server={"flight_steps": 5}) as server:
            await asyncio.gather(server.complete("secret words", max_tokens=9), server.complete([1, 2, 3], max_tokens=9))
            await server.idle()
            text = (await server.client.get("/debug/flight")).text
            shown = Flight.model_validate_json(text)
            assert [step.step for step in shown.steps] == [report.step for report in server.reports[-5:]]
            for step, report in zip(shown.steps, server.reports[-5:], strict=True):
                assert sum(length for _, length in step.rows) == step.tokens == report.num_tokens
                assert len(step.rows) == report.num_rows and step.kv["filled"] == report.usage.filled
                assert step.rows == list(zip(report.starts, report.lengths, strict=True))
            longest = max(start for step in shown.steps for start, _ in step.rows)
            assert longest in (len("secret words") + 7, 3 + 7), "the last step computes all positions but the last token's"
            assert "secret" not in text

    run(test())


def test_what_led_to_a_failing_step_is_written_down(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once for many in a row, to the log and to a file: the undone step is its last, with rows and reason."""

    async def test() -> None:
        async with serving(folder, server={"flight_dir": str(tmp_path / "new")}, debug=False) as server:
            engine = server.here.llm.built.engine
            await server.complete([1, 2, 3])
            submit, left = engine.runner.submit, [3]

            def failing(plan: Any) -> Any:
                if left[0] and len(plan.chunks) > 1:
                    left[0] -= 1
                    raise OutOfMemoryError("device memory is full")
                return submit(plan)

            engine.runner.submit = failing  # type: ignore[method-assign]
            answers = await asyncio.gather(*(server.complete([i] * 6, max_tokens=4) for i in range(8)))
            assert {answer.status_code for answer in answers} == {200} and left[0] < 3
            (file,) = (tmp_path / "new").iterdir()
            written = Flight.model_validate_json(file.read_text())
            assert written.reason == "a step failed: OutOfMemoryError: device memory is full"
            *before, last = written.steps
            assert last.error and len(last.rows) > 1 and all(not step.error for step in before) and len(before) >= 8
            assert "device memory is full; the last steps" in caplog.text and str(file) in caplog.text

    with caplog.at_level(logging.ERROR, logger="octavo.server"):
        run(test())


def test_a_full_disk_loses_the_file_alone(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so, and requests are answered."""
    (tmp_path / "taken").write_text("")

    async def test() -> None:
        async with serving(folder, server={"flight_dir": str(tmp_path / "taken")}) as server:
            server.here.flight.write_down("a test")
            assert (await server.complete([1, 2, 3])).status_code == 200

    with caplog.at_level(logging.ERROR, logger="octavo.server"):
        run(test())
    assert "could not be written" in caplog.text


def test_a_hanging_step_can_be_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it hangs, /debug/flight shows its rows, /load and /metrics its age with the last numbers, /debug/kv says 503 in time."""
    for module in (served, __import__("octavo.server.debug", fromlist=["debug"])):
        monkeypatch.setattr(module, "READ_WAIT_S", 0.1)

    async def test() -> None:
        async with serving(folder) as server:
            await server.complete([1, 2, 3])
            runner, go_on, began = server.here.llm.built.engine.runner, threading.Event(), threading.Event()
            submit = runner.submit

            def hanging(plan: Any) -> Any:
                handle = submit(plan)
                began.set()
                go_on.wait(20)
                return handle

            runner.submit = hanging  # type: ignore[method-assign]
            try:
                task = asyncio.create_task(server.complete([5] * 7))
                await asyncio.to_thread(began.wait, 20)
                shown = Flight.model_validate_json((await server.client.get("/debug/flight")).text)
                assert [plan.rows for plan in shown.in_flight] == [[(0, 7)]]
                assert (await server.client.get("/load")).json()["step_age_s"] > 0
                found = await server.metrics()
                assert found["octavo:step_age_seconds", ()] > 0 and found["octavo:generation_tokens_total", ()] >= 8
                busy = await server.client.get("/debug/kv")
                assert busy.status_code == 503 and busy.json()["error"]["code"] == "busy"
            finally:
                go_on.set()
            assert (await task).status_code == 200

    run(test())


def test_the_death_of_the_engine_is_written_down(folder: Path, tmp_path: Path) -> None:
    """With its reason, and /debug/flight still answers; /debug/kv says that the engine has stopped."""

    async def test() -> None:
        async with serving(folder, server={"flight_dir": str(tmp_path), "on_death": "stay"}) as server:
            lifecycle = Lifecycle(server.here)
            server.here.llm.on_death = lifecycle._engine_died
            await server.complete([1, 2, 3])
            server.here.llm.engine_loop.post(die)
            while server.here.status != "dead":
                await asyncio.sleep(0.01)
            (file,) = tmp_path.iterdir()
            written = json.loads(file.read_text())
            assert written["reason"] == "the engine has stopped" and len(written["steps"]) == 8
            assert len((await server.client.get("/debug/flight")).json()["steps"]) == 8
            assert (await server.client.get("/debug/kv")).json()["error"]["code"] == "engine_stopped"

    run(test())


def test_records_of_failing_steps_pause(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    """Another one is written after the pause, not before."""

    async def test() -> None:
        async with serving(folder, server={"flight_dir": str(tmp_path)}) as server:
            await server.complete([1])
            report = server.reports[-1]
            recorder = server.here.flight
            for after, files in ((0.0, 1), (59.0, 1), (61.0, 2)):
                fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
                recorder.octavo_step_finished(type(report)(**{**fields, "time": after, "error": "it"}))
                assert len(list(tmp_path.iterdir())) == files
            assert flight.PAUSE_S == 60

    run(test())

"""A served tiny model for tests of what a server tells of itself: called in-process, with no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from octavo.async_llm import AsyncLLM
from octavo.core.outputs import RequestOutput, StepReport
from octavo.server.app import create_app
from octavo.server.served import Served
from octavo.server.settings import ServerSettings

BOUND = 60.0
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "debug": True, "max_model_len": 128, "block_size": 4, "max_num_seqs": 8}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def run(test: Coroutine[Any, Any, None]) -> None:
    """In an event loop of its own, within a bound."""
    asyncio.run(asyncio.wait_for(test, BOUND))


@dataclass
class Running:
    """A server, a client of it, and what its engine told another observer."""

    here: Served
    client: httpx.AsyncClient
    answers: list[RequestOutput] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def octavo_request_finished(self, output: RequestOutput) -> None:
        self.answers.append(output)

    def octavo_step_finished(self, report: StepReport) -> None:
        self.reports.append(report)

    async def complete(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST /v1/completions; greedy, and to max_tokens."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def metrics(self) -> Samples:
        """GET /metrics, by name and labels without model and engine."""
        answer = await self.client.get("/metrics")
        assert answer.status_code == 200, answer.text
        return samples(answer.text)

    async def idle(self) -> None:
        """Wait until the engine has nothing to do."""
        while self.here.llm.built.engine.has_work:
            await asyncio.sleep(0.01)


def samples(text: str) -> Samples:
    """What another program reads in it."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key not in ("model_name", "engine")))
            assert (sample.name, labels) not in found, f"{sample.name} twice"
            found[sample.name, labels] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    """One sample."""
    return found[name, tuple(sorted(labels.items()))]


@asynccontextmanager
async def serving(folder: Path, *, server: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Running]:
    """A server with an engine of its own; it must be empty at the end."""
    async with AsyncLLM(model=folder, **{"num_kv_slots": 1024, **SETTINGS, **settings}) as llm:
        here = Served(llm, ServerSettings(**(server or {})), ("tiny",))
        transport = httpx.ASGITransport(create_app(here), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=BOUND) as client:
            running = Running(here, client)
            llm.built.engine.observers.add(running)
            yield running


class Deadly(BaseException):
    """No engine's thread survives it."""


def die(engine: object) -> None:
    """To be posted to an engine."""
    raise Deadly("division by zero")

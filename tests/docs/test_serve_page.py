"""The page about serving: its example of classes is served, and each row of its table is tried."""

from __future__ import annotations

import asyncio
import re
import threading
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, cast

import httpx

from octavo.async_llm import AsyncLLM
from octavo.core.assembly import build_engine, load_model
from octavo.core.registry import Registry
from octavo.core.settings.config import load_config
from octavo.server.app import create_app
from octavo.server.served import Served
from octavo.server.settings import ServerSettings
from tests.models import tiny
from tests.server.observed import BOUND, run


def example() -> str:
    """The TOML of the section about classes."""
    page = (Path(__file__).parents[2] / "docs/howto/serve.md").read_text()
    section = page.partition("## Limits by class of request")[2]
    found = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_example_of_classes_does_what_the_page_says(tmp_path: Path) -> None:
    """Lengths, the queue, timeouts, and who may have which class; the numbers are read from the example."""
    file = tmp_path / "octavo.toml"
    file.write_text(example())
    written = tomllib.loads(example())
    default, batch = (written["scheduler"]["classes"][name] for name in ("default", "batch"))
    app_key, job_key = written["server"]["api_key"]
    size = {"max_model_len": 2048, "num_kv_slots": 8192, "device": "cpu", "dtype": "float32"}
    overrides = {"model": {"source": str(tiny("llama_gqa", max_position_embeddings=2048))}, "engine": size}

    async def test() -> None:
        registry = Registry.discover()
        config = load_config(registry, file=str(file), overrides=overrides, server=ServerSettings)
        llm = AsyncLLM.from_builder(lambda: build_engine(registry, config, load_model(registry, config)))
        here = Served(llm, cast(ServerSettings, config.server), ("tiny",))
        transport = httpx.ASGITransport(create_app(here))

        async def ask(key: str, of_class: str | None = None, **fields: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}", **({"X-Octavo-Class": of_class} if of_class else {})}
            body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True, **fields}
            return await client.post("/v1/completions", json=body, headers=headers)

        def refused(answer: httpx.Response, status: int, *words: object) -> None:
            assert answer.status_code == status and all(str(word) in answer.text for word in words), answer.text

        async with llm, httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=BOUND) as client:
            most_in, most_out = default["max_input_tokens"], default["max_output_tokens"]
            refused(await ask(app_key, prompt=[1] * (most_in + 1)), 400, most_in + 1, most_in)
            refused(await ask(app_key, max_tokens=most_out + 1), 400, most_out + 1, most_out)
            assert (await ask(job_key, prompt=[1] * (most_in + 1))).status_code == 200
            most_s = written["server"]["max_timeout_s"]
            refused(await ask(app_key, timeout_s=most_s + 1), 400, f"{most_s + 1:g}", f"{most_s:g}")
            refused(await ask(job_key, "default"), 403, "batch")
            refused(await ask(app_key, "gold"), 400, "gold", "batch", "default")

            gate = threading.Event()
            held = asyncio.create_task(llm.call(lambda engine: gate.wait(BOUND)))
            await asyncio.sleep(0)
            jobs = [asyncio.create_task(ask(job_key)) for _ in range(batch["max_queue"] + 3)]
            timed = asyncio.create_task(ask(app_key, request_id="timed", timeout_s=most_s))
            while len(llm._open) < len(jobs) + 1:
                await asyncio.sleep(0.001)
            deadline = asyncio.create_task(llm.call(lambda engine: engine.requests["timed"].deadline - engine.requests["timed"].arrival))
            await asyncio.sleep(0)
            gate.set()
            await held
            assert await deadline == default["timeout_s"]
            answers = await asyncio.gather(*jobs)
            assert Counter(answer.status_code for answer in answers) == {200: batch["max_queue"], 429: 3}
            assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 429)
            assert (await timed).status_code == 200

    run(test())

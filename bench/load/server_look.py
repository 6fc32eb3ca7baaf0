"""What a server says of itself: who it is, before a run, and what it counted, around one. What it does not say has a reason instead.

Octavo's own server describes its engine; of another one its models, its version and its header `server` are asked.
Must not know: what is asked of it in a run.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter, ValidationError

from octavo.bench.identity import ServerIdentity, now
from octavo.bench.load.http1 import Answer, BrokenAnswer, get
from octavo.bench.load.target import Target
from octavo.core.description import Description

WAIT_S = 30.0
STARTED = "process_start_time_seconds"
COUNTERS = {
    "preemptions": "num_preemptions_total",
    "failed steps": "failed_steps_total",
    "steps out of memory": "out_of_memory_steps_total",
}
RESTARTS = "restarts"
"""Counted as one where the server's process is another one than before, however often it was started meanwhile."""


async def ask(target: Target, path: str) -> Answer | str:
    """GET it, on a connection of its own; why there is no answer with status 200 otherwise."""
    try:
        connection = await target.connect(timeout_s=WAIT_S)
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    try:
        request = get(target.path(path), host=target.host, headers=target.headers)
        answer = await asyncio.wait_for(connection.ask(request), WAIT_S)
    except TimeoutError:
        return f"{path} did not answer within {WAIT_S:g} s"
    except (OSError, BrokenAnswer) as error:
        return f"{path} broke off: {error}"
    finally:
        await connection.closed()
    return answer if answer.status == 200 else f"{path} answers {answer.status}"


async def identify_server(target: Target) -> tuple[ServerIdentity, Description | None]:
    """Who it is, and of Octavo's own what its engine is."""
    models, version, engine = [await ask(target, path) for path in ("/v1/models", "/version", "/debug/engine")]
    found = ServerIdentity(date=now(), url=target.url, endpoint=target.endpoint, model=target.model)
    card = _card(models, target.model)
    header = "" if isinstance(models, str) else models.headers.get("server", "")
    known: dict[str, Any] = {}
    unknown: dict[str, str] = {}

    def keep(name: str, value: Any, why_not: str) -> None:
        (known if value else unknown)[name] = value or why_not

    said = card if isinstance(card, dict) else {}
    why = card if isinstance(card, str) else "/v1/models does not say"
    keep("software", said.get("owned_by") or header, f"{why}, and no header `server` does")
    keep("version", _version(version), version if isinstance(version, str) else "/version does not say")
    keep("root", str(said.get("root") or ""), why)
    keep("max_model_len", said.get("max_model_len") if isinstance(said.get("max_model_len"), int) else 0, why)
    described = _described(engine)
    if isinstance(described, str):
        unknown["engine"] = described
    return replace(found, **known, unknown=unknown), None if isinstance(described, str) else described


async def count(target: Target) -> dict[str, float]:
    """What it has counted since it began, and when that was; empty where /metrics is none of Prometheus'."""
    answer = await ask(target, "/metrics")
    if isinstance(answer, str):
        return {}
    wanted = {metric: name for name, metric in COUNTERS.items()} | {STARTED: STARTED}
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                name = wanted.get(sample.name.partition(":")[2] or sample.name)
                if name is not None:
                    found[name] = found.get(name, 0.0) + sample.value
    except ValueError:
        return {}
    return found


def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, int | None]:
    """What was counted in between; None where it is not told. A server that began anew counts from 0."""
    again = STARTED in before and STARTED in after and before[STARTED] != after[STARTED]
    found: dict[str, int | None] = {RESTARTS: int(again) if STARTED in before and STARTED in after else None}
    for name in COUNTERS:
        known = name in after and (name in before or again)
        found[name] = round(after[name] - (0.0 if again else before[name])) if known else None
    return found


def _card(answer: Answer | str, model: str) -> dict[str, Any] | str:
    if isinstance(answer, str):
        return answer
    try:
        cards = [card for card in json.loads(answer.body)["data"] if card["id"] == model]
    except (ValueError, LookupError, TypeError):
        return "/v1/models is no list of models"
    return cards[0] if cards else f"/v1/models does not name {model}"


def _version(answer: Answer | str) -> str:
    try:
        return "" if isinstance(answer, str) else str(json.loads(answer.body)["version"])
    except (ValueError, LookupError, TypeError):
        return ""


def _described(answer: Answer | str) -> Description | str:
    if isinstance(answer, str):
        return answer
    try:
        return _DESCRIPTION.validate_json(answer.body)
    except ValidationError:
        return "/debug/engine is not what Octavo's server says there"


_DESCRIPTION = TypeAdapter(Description)

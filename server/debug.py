"""GET /debug/kv, /debug/flight and /debug/engine: what the KV pool holds, the last steps, what the engine is made of.

Read-only; lengths, ids and hashes, never a text.

Must not know: allocators, schedulers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from octavo.core.description import Description, describe
from octavo.core.engine import Engine
from octavo.core.errors import EngineError
from octavo.core.kv import BlockState, KVUsage
from octavo.server.errors import ERRORS, ApiError
from octavo.server.served import READ_WAIT_S, authorised, served

router = APIRouter(dependencies=[Depends(authorised)], responses=ERRORS)
KEY_DIGITS = 12  # of a hash, in hex: enough to tell blocks apart


class Block(BaseModel):
    """A block or region that holds something."""

    start: int = Field(description="its first slot")
    count: int = Field(description="its slots")
    state: Literal["used", "shared", "cached"] = Field(description="of one sequence, of several, or kept for reuse")
    owners: list[str] = Field(description="the sequences that hold it, or the request that keeps a region for one")
    key: str = Field(description="the beginning of its prefix hash; empty where it cannot be found by that")


class KVPool(BaseModel):
    """What the KV pool holds."""

    layout: Literal["block_table", "region"]
    block_size: int = Field(description="slots of a block; 0 where there are regions")
    capacity: int = Field(description="slots")
    usage: dict[str, int] = Field(description="slots by what they hold")
    blocks: list[Block]
    free: list[tuple[int, int]] = Field(description="runs of slots that hold nothing: first slot and length")


class StepRecord(BaseModel):
    """One step."""

    step: int
    time: float = Field(description="when it began, on the engine's clock")
    running: int
    waiting: int
    rows: list[tuple[int, int]] = Field(description="first position and number of tokens of each row")
    tokens: int
    sampled: int
    idle_rows: int
    preempted: int
    failed: int
    transfers: dict[str, int] = Field(description="slots moved, by kind")
    kv: dict[str, int] = Field(description="slots by what they hold, after the step")
    seconds: dict[str, float] = Field(description="time by part")
    error: str = Field(description="why it was undone, if it was")


class PlanRecord(BaseModel):
    """A step that is not over."""

    rows: list[tuple[int, int]]
    tokens: int
    preempted: int
    transfers: int


class Flight(BaseModel):
    """The last steps, the oldest first."""

    reason: str = Field(description="why it was written down; empty where somebody asks")
    time: str
    engine_time: float
    in_flight: list[PlanRecord]
    steps: list[StepRecord]


@router.get("/debug/kv", response_model=KVPool)
async def debug_kv(request: Request) -> Response:
    """Every block's state, owners and the beginning of its hash. The first look makes steps tell what changes, for a minute."""
    here = served(request)

    def look(engine: Engine) -> tuple[int, KVUsage]:
        return here.block_watch.look(engine), engine.kv.usage()

    try:
        number, usage = await asyncio.wait_for(here.llm.call(look), READ_WAIT_S)
    except TimeoutError:
        raise ApiError(503, f"the engine did not come to it within {READ_WAIT_S:g} s: a step takes long", code="busy") from None
    except EngineError as error:
        raise ApiError(503, str(error), code="engine_stopped") from error
    kv, states = here.llm.built.engine.kv, here.block_watch.states(number)
    pool = {
        "layout": kv.layout,
        "block_size": kv.block_size,
        "capacity": kv.capacity,
        "usage": asdict(usage),
        "blocks": [_block(state) for state in states],
        "free": free_runs(states, kv.capacity),
    }
    return Response(json.dumps(pool), media_type="application/json")


@router.get("/debug/engine")
async def debug_engine(request: Request) -> Description:
    """Versions, model and revision, types, plugins with their options, pool, device and machine: what a measurement is of."""
    return await asyncio.to_thread(describe, served(request).llm.built)


@router.get("/debug/flight", response_model=Flight)
async def debug_flight(request: Request) -> Response:
    """The last steps: lengths, KV, queue, times. Answers while a step hangs, and after the engine has died."""
    return Response(json.dumps(served(request).flight.record()), media_type="application/json")


def _block(state: BlockState) -> dict[str, Any]:
    kind = "cached" if not state.owners else "used" if len(state.owners) == 1 else "shared"
    return {"start": state.start, "count": state.count, "state": kind, "owners": state.owners, "key": state.key[:KEY_DIGITS]}


def free_runs(states: Iterable[BlockState], capacity: int) -> list[tuple[int, int]]:
    """The slots between blocks, which come by their first slot."""
    runs, at = [], 0
    for state in states:
        if state.start > at:
            runs.append((at, state.start - at))
        at = state.start + state.count
    if capacity > at:
        runs.append((at, capacity - at))
    return runs

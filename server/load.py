"""GET /load for routers and autoscalers, POST /reset_prefix_cache for people.

Must not know: engines' insides.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from octavo.core.engine import Engine
from octavo.server.errors import ERRORS, ApiError
from octavo.server.served import READ_WAIT_S, authorised, served

router = APIRouter(dependencies=[Depends(authorised)], responses=ERRORS)


class Load(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="HTTP requests not answered yet")
    running: int = Field(description="requests that the scheduler runs")
    waiting: int = Field(description="requests that wait for the scheduler")
    kv_usage: float = Field(description="share of the KV pool that live sequences hold")
    step_age_s: float = Field(description="how long the step that runs now has taken; 0 between steps")


class Reset(BaseModel):
    """What was dropped."""

    freed_slots: int = Field(description="KV slots that were kept for reuse and are free now")


@router.get("/load")
async def load(request: Request) -> Load:
    """Requests and KV in use, cheap enough to be asked every second."""
    here = served(request)
    reading = await here.read()
    return Load(
        server_load=here.num_active,
        running=reading.running,
        waiting=reading.waiting,
        kv_usage=reading.kv_usage,
        step_age_s=here.llm.engine_loop.stalled_for(),
    )


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Reset:
    """Drop what is kept for reuse. Running requests keep theirs; what they computed is not found by others any more."""

    def reset(engine: Engine) -> int:
        cached = engine.kv.usage().cached
        engine.kv.reset()
        return cached - engine.kv.usage().cached

    try:
        return Reset(freed_slots=await asyncio.wait_for(served(request).llm.call(reset), READ_WAIT_S))
    except TimeoutError:
        raise ApiError(503, f"the engine did not come to it within {READ_WAIT_S:g} s; it will, between two steps", code="busy") from None

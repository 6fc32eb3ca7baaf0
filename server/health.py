"""GET /health, /ready, /version: for probes and people.

Must not know: engines' insides.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from octavo._version import __version__
from octavo.server.served import served

router = APIRouter()


class State(BaseModel):
    """How the server is."""

    status: Literal["ok", "ready", "draining", "dead"]
    reason: str = Field("", description="why it is neither ok nor ready")


UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": State}}


@router.get("/health", response_model=State, responses=UNAVAILABLE)
async def health(request: Request) -> JSONResponse:
    """200 while the engine lives, else 503 with the reason. For liveness probes."""
    here = served(request)
    if here.status == "dead":
        return JSONResponse({"status": "dead", "reason": here.reason}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/ready", response_model=State, responses=UNAVAILABLE)
async def ready(request: Request) -> JSONResponse:
    """200 while new requests are taken, else 503. For readiness probes."""
    here = served(request)
    return JSONResponse({"status": here.status, "reason": here.reason}, 200 if here.status == "ready" else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Octavo's version."""
    return {"version": __version__}

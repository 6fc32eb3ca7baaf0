"""GET /v1/models: what is served.

Must not know: engines.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from octavo.server.errors import ERRORS
from octavo.server.json_body import JsonRoute
from octavo.server.served import Served, authorised, served

router = APIRouter(route_class=JsonRoute, dependencies=[Depends(authorised)])


class ModelCard(BaseModel):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models", responses=ERRORS)
async def models(request: Request) -> ModelList:
    """The names that `model` may have in requests."""
    here = served(request)
    return ModelList(data=[_card(here, name) for name in here.model_names])


@router.get("/v1/models/{name:path}", responses=ERRORS)
async def model(request: Request, name: str) -> ModelCard:
    """One of them."""
    here = served(request)
    return _card(here, here.check_model(name))


def _card(here: Served, name: str) -> ModelCard:
    engine = here.llm.built.engine
    return ModelCard(id=name, created=here.created, root=str(here.llm.built.config.source), max_model_len=engine.max_model_len)

"""`create_app`: the FastAPI application around one engine.

Must not know: command lines, sockets, signals.
"""

from __future__ import annotations

from fastapi import FastAPI

from octavo._version import __version__
from octavo.server import debug, document, errors, health, load, metrics
from octavo.server.access_log import AccessLines
from octavo.server.body_limit import BodyLimit
from octavo.server.last_resort import LastResort
from octavo.server.openai import chat, completions, models, tokens
from octavo.server.served import Served

ROUTERS = (chat.router, completions.router, models.router, tokens.router, health.router, metrics.router, load.router, debug.router)


def create_app(here: Served) -> FastAPI:
    """All routes."""
    app = FastAPI(title="Octavo", version=__version__, description="An OpenAI-compatible server for one model.")
    app.state.served = here
    app.state.metrics = metrics.make_registry(here)
    errors.add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    document.complete(app)
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimit, limit=here.settings.max_body_bytes)
    app.add_middleware(AccessLines, log=here.access_log)
    return app

"""Counts the requests that are not answered yet, so that a server can wait for them before it ends.

Must not know: routes' insides.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.served import Served


class Activity:
    """Counts requests of /v1 into `Served.num_active` while they run."""

    def __init__(self, app: ASGIApp, *, here: Served) -> None:
        self._app = app
        self._here = here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        self._here.num_active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._here.num_active -= 1

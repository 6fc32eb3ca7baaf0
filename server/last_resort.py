"""What nobody foresaw is answered with 500 in the form of all errors, and the connection lives on.

Starlette would answer it too, but raise it again for the server's log, whereupon uvicorn hangs up on a client that may have sent its next
request. Must not know: routes.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import as_api_error


class LastResort:
    """The innermost layer. An answer that has begun can only be broken off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        def noted(message: Message) -> Awaitable[None]:
            nonlocal begun
            begun = True
            return send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            api_error = as_api_error(error)  # which logs it
            await JSONResponse(api_error.body, api_error.status, api_error.headers)(scope, receive, send)

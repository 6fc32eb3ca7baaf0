"""The OpenAPI document: FastAPI's, corrected where this server differs, with the chunks of streams that FastAPI does not see.

Must not know: routes.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo.server.openai.chat_schema import ChatCompletionChunk
from octavo.server.openai.completions_schema import CompletionChunk

CHUNKS: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": CompletionChunk}
UNUSED = ("HTTPValidationError", "ValidationError")


def complete(app: FastAPI) -> None:
    """Have the app tell this document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _correct(plain())
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _correct(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # what does not fit its schema is a 400 here, as at OpenAI
    for name in UNUSED:
        schemas.pop(name, None)
    _, chunks = models_json_schema([(model, "serialization") for model in CHUNKS.values()], ref_template="#/components/schemas/{model}")
    schemas.update(chunks["$defs"])
    for path, model in CHUNKS.items():
        stream = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        stream["x-event-data"] = {"$ref": f"#/components/schemas/{model.__name__}"}  # OpenAPI 3.1 has no word for it

"""Messages of a request as chat templates want them.

Must not know: templates.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.openai.chat_schema import Message

UNSEEN = {"refusal", "annotations", "function_call", "audio"}  # of OpenAI's answers, which come back in conversations


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Text in one string, a call's arguments as an object. Raises ApiError."""
    return [_plain(number, message) for number, message in enumerate(messages)]


def _plain(number: int, message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude=UNSEEN)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    plain.setdefault("content", message.refusal or "")
    for place, call in enumerate(plain.get("tool_calls", ())):
        function = call["function"]
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            where = f"messages[{number}].tool_calls[{place}].function.arguments"
            raise ApiError(400, f"{where}: not valid JSON: {error}", param=where) from error
    return plain

"""Tools in plain messages, for chat templates that know none: they would drop them in silence.

In the words that Hermes and Qwen models were trained on, which other models understand as well. Must not know: templates, token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.core.errors import RequestError

Message = dict[str, Any]

INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

TAG = "<tool_call>"
RESULT, END_OF_RESULT = "<tool_response>\n", "\n</tool_response>"


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The conversation with its calls in the assistant's words and their results in the user's."""
    told: list[Message] = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if calls := message.get("tool_calls"):
            plain["content"] = "\n".join(filter(None, [message.get("content"), *map(_call, calls)]))
        elif message["role"] == "tool":
            plain = {"role": "user", "content": f"{RESULT}{message['content']}{END_OF_RESULT}"}
            if told and told[-1]["role"] == "user" and told[-1].get("content", "").endswith(END_OF_RESULT):
                plain["content"] = f"{told.pop()['content']}\n{plain['content']}"  # several results are one turn
        told.append(plain)
    return told


def tools_as_text(messages: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
    """The conversation with its tools told in the system message."""
    first, *rest = messages
    text = INSTRUCTIONS.format(tools="\n".join(map(_json, tools)))
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first.get('content', '')}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, first, *rest]


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError("messages: each of tool_calls must have a function with name and arguments", field="messages")
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(function.get("name"))}, "arguments": {written or "{}"}}}\n</tool_call>'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

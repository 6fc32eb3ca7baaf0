"""Tools in plain messages, for chat templates that know none: they would drop them in silence.

In the words that Hermes and Qwen models were trained on, which other models understand as well. Must not know: templates, token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def tools_as_text(messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
    """The conversation with its tools told in the system message, its calls in the assistant's and their results in the user's."""
    told: list[Message] = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if calls := message.get("tool_calls"):
            plain["content"] = "\n".join(filter(None, [message.get("content"), *map(_call, calls)]))
        elif message["role"] == "tool":
            plain = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            if told and told[-1].get("content", "").endswith("</tool_response>") and told[-1]["role"] == "user":
                plain["content"] = f"{told.pop()['content']}\n{plain['content']}"  # several results are one turn
        told.append(plain)
    if tools:
        text = INSTRUCTIONS.format(tools="\n".join(_json(tool) for tool in tools))
        if told[0]["role"] in ("system", "developer"):
            told[0] = {**told[0], "content": f"{told[0].get('content', '')}\n\n{text}"}
        else:
            told.insert(0, {"role": "system", "content": text})
    return told


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(function.get("name"))}, "arguments": {written or "{}"}}}\n</tool_call>'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

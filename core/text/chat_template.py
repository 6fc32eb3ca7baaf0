"""Messages to prompt text, by the Jinja template that a model brings along.

Templates are written for transformers' `apply_chat_template`; its environment (filters, globals, whitespace rules, what a
template may see) is rebuilt here, without transformers. Templates come from strangers: they run in Jinja's immutable sandbox
and see plain JSON data only. A template that knows no tools is told of them in the messages.

Must not know: token ids, the tokenizer, HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.core.errors import RequestError
from octavo.core.text.tool_prompt import TAG, calls_as_text, tools_as_text

if TYPE_CHECKING:
    import jinja2

NO_TEMPLATE = (
    "this model has no chat template, so messages can't be turned into a prompt: send a plain prompt instead, "
    "or put a chat_template.jinja into the model's folder"
)


class ChatTemplate:
    """One template of a model. Jinja is imported, and the template compiled, at its first use."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: names and texts that the template may use, such as `bos_token`."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """The prompt's text. Raises RequestError: malformed messages, or messages that the template refuses."""
        try:
            plain = [_checked(index, message) for index, message in enumerate(_checked_list(messages))]
            plain_tools = None if tools is None else [_checked_tool(index, tool) for index, tool in enumerate(_checked_tools(tools))]
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply, or hold themselves", field="messages") from None
        template = self._compiled
        if "tool_calls" not in self._words:
            plain = calls_as_text(plain)
        if plain_tools and "tools" not in self._words:
            plain, plain_tools = tools_as_text(plain, plain_tools), None
        variables: dict[str, Any] = {
            "messages": plain,
            "tools": plain_tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(**self._special_tokens, **variables)
        except Exception as error:  # besides its own kinds, Jinja lets any of Python's through: None + "a" is a TypeError
            raise RequestError(f"the model's chat template can't render these messages: {error}", field="messages") from error

    @cached_property
    def tags_calls(self) -> bool:
        """Whether the model is asked to write each tool call in tags: by the template, or by us where that knows no tools."""
        return "tools" not in self._words or TAG in self._source

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2

        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is broken at line {error.lineno}: {error.message}; mend chat_template.jinja in its folder",
                field="messages",
            ) from error

    @cached_property
    def _words(self) -> set[str]:
        """The variables and properties that the template reads."""
        from jinja2 import nodes

        tree = _environment().parse(self._source)
        variables = {node.name for node in tree.find_all(nodes.Name)}
        properties = {node.attr for node in tree.find_all(nodes.Getattr)}
        return variables | properties | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


def _environment() -> jinja2.Environment:
    """The environment of transformers 5 (`utils/chat_template_utils.py`)."""
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here its body is just text."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        """Jinja's own filter escapes HTML, which no model was trained on."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(layout: str) -> str:
        """Today's date on the wall, which some system prompts state; the engine's clock only measures intervals."""
        return datetime.now().strftime(layout)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _checked_list(messages: object) -> Sequence[object]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}", field="messages")
    if not messages:
        raise RequestError("messages is empty: send at least one message", field="messages")
    return messages


def _checked(index: int, message: object) -> dict[str, Any]:
    """A plain copy of a message, its text parts joined. Keys that are None are dropped: templates would print "None"."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(
            f'{where} must be an object such as {{"role": "user", "content": "Hi"}}, not {type(message).__name__}', field=where
        )
    plain = {str(key): _plain(value, f"{where}.{key}") for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f'{where}.role must be a string such as "user", not {role!r}', field=f"{where}.role")
    if "content" in plain:
        plain["content"] = _text_of(plain["content"], f"{where}.content")
    elif not plain.get("tool_calls"):
        raise RequestError(f"{where}.content is missing: only a message with tool_calls may leave it out", field=f"{where}.content")
    return plain


def _text_of(content: object, where: str) -> str:
    """OpenAI's list of text parts is joined: most templates know strings only."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts, not {type(content).__name__}", field=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{where}[{index}] must be {{"type": "text", "text": "..."}}; this engine reads text only', field=f"{where}[{index}]"
            )
        texts.append(part["text"])
    return "".join(texts)


def _checked_tools(tools: object) -> Sequence[object]:
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list of JSON schema objects, not {type(tools).__name__}", field="tools")
    return tools


def _checked_tool(index: int, tool: object) -> Any:
    where = f"tools[{index}]"
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be a JSON schema object, not {type(tool).__name__}", field=where)
    return _plain(tool, where)


def _plain(value: object, where: str) -> Any:
    """A copy made of JSON's types alone, so that a template can call no method of the caller's objects."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return str.__str__(value)
        case Mapping():
            return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case _:
            raise RequestError(f"{where} must be JSON data, not {type(value).__name__}", field=where)

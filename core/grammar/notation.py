"""Whatever kind of structured output is wanted, as one grammar in Lark's notation, the way llguidance reads it.

Nothing is forced: where a grammar leaves one text alone, llguidance would have it written in the one way in which its tokenizer splits
it. Here every token that goes on with the text is allowed, and the model chooses (docs/adr/0010).
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.core.errors import RequestError
from octavo.core.grammar.engine import shortened
from octavo.core.structured_outputs import StructuredOutputsParams

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'  # at the end, so that places in messages are those in the user's text


def as_lark(wanted: StructuredOutputsParams) -> str:
    """Raises RequestError: not a JSON schema, half a surrogate pair, or options that are not the user's to set."""
    import llguidance

    match wanted.kind:
        case "json":
            start = f"start: {_json(_schema(wanted.json or ''), wanted)}"
        case "json_object":
            start = f"start: {_json({'type': 'object'}, wanted)}"
        case "regex":
            start = f"start: /{llguidance.regex_to_lark(_whole(wanted.regex or ''), '')}/"
        case "choice":
            choices = " | ".join(json.dumps(_whole(choice), ensure_ascii=False) for choice in wanted.choice or ())
            start = f"start: CHOICE\nCHOICE: {choices}"  # upper case: one token of the lexer, so that thousands of them are one automaton
        case _:
            start = _whole(wanted.grammar or "")
            if "%llguidance" in start:
                raise refused("%llguidance options are set by the engine: leave that line out")
    return start + _NO_FORCING


def refused(message: str) -> RequestError:
    """What is wrong with a request's structured output."""
    return RequestError(f"structured_outputs: {message}", field="structured_outputs")


def explained(error: str, kind: str) -> str:
    """An error of the grammar engine, without the parts that speak of what `as_lark` wrote around the user's text."""
    if kind == "grammar":
        return shortened(error)
    error = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error)
    return shortened(re.split(r"\n\s*\d+ \| ", error)[0].replace(" (in regex)", "").strip())


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"json is no JSON schema: {error}") from None
    if not isinstance(schema, dict | bool):
        raise refused(f"json is no JSON schema: it must be an object, true or false, not {text!r:.60}")
    if schema is False:
        raise refused("json allows nothing: the schema is false")
    return schema if isinstance(schema, dict) else {}


def _json(schema: dict[str, Any], wanted: StructuredOutputsParams) -> str:
    given = schema.get("x-guidance", {})
    if not isinstance(given, dict):
        raise refused(f"x-guidance must be an object, not {given!r:.60}")
    options = given | {"lenient": False, "whitespace_flexible": not wanted.disable_any_whitespace}
    try:
        return f"%json {_whole(json.dumps(schema | {'x-guidance': options}))}"
    except RecursionError:
        raise refused("json is nested too deeply") from None


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refused(f"half a surrogate pair, U+{ord(text[error.start]):04X}, at character {error.start}: send the whole one") from None
    return text

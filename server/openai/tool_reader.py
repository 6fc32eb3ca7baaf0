"""`ToolReader`: finds calls in what a model writes, while it writes; what turns out to be none is content.

Understood are `<tool_call>...</tool_call>` around a JSON object or a list of them (Hermes, Qwen, SmolLM), anywhere; and an output that
begins with such JSON itself (Llama 3.1, Mistral after its special token, and whatever a grammar forces), unless that may be an answer.
An object is a call if it has the `name` of a tool and `arguments` or `parameters`. Text is held back only while it may still become a call.
However the text is cut into pieces, the pieces of an answer add up to the same. Must not know: HTTP, grammars, templates.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from octavo.server.openai.json_scan import SPACE, At, ObjectScan

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "function"})  # an object with others is no call
ARGUMENTS = ("arguments", "parameters")
SEPARATORS = {ord(character): None for character in ",;]"}


@dataclass(slots=True)
class CallPiece:
    """What is new of one call. The first piece has its id and name, all together its arguments, as the model wrote them."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ToolPiece:
    """What is new of an answer."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id when it comes back."""
    return uuid.uuid4().hex[:9]


class ToolReader:
    """One output. Without `parallel`, calls after the first one are dropped; with `only_tagged`, JSON without tags is content."""

    def __init__(self, names: Collection[str], *, parallel: bool, only_tagged: bool = False) -> None:
        self.names = names
        self.num_calls = 0
        self._parallel = parallel
        self._only_tagged = only_tagged
        self._piece = ToolPiece()
        self._buffer = ""  # not looked at yet, or too short to be told what it is
        self._space = ""  # white space that is content only if more content follows
        self._begun = False  # something came that was not white space
        self._candidate: _Candidate | None = None

    def push(self, text: str, *, last: bool = False) -> ToolPiece:
        """Go on with this text; `last`: nothing follows."""
        self._buffer += text
        self._piece = ToolPiece()
        while self._buffer and self._advance(last=last):
            pass
        if last:
            if self._candidate is not None:
                self._say(self._candidate.leave())
            if not self.num_calls:
                self._piece.content += self._space
        return self._piece

    def _advance(self, *, last: bool) -> bool:
        """Take some of the buffer. False: more must come before anything can be said of it."""
        if self._candidate is None:
            taken = self._read_text(self._buffer, last=last)
            moved = taken > 0 or self._candidate is not None
        else:
            taken = self._candidate.feed(self._buffer)
            moved = taken > 0 or self._candidate.over
            if self._candidate.over:
                self._say(self._candidate.leave())
                self._candidate = None
        self._buffer = self._buffer[taken:]
        return moved

    def _read_text(self, text: str, *, last: bool) -> int:
        """Outside of any call: up to what may begin one; returns how much was taken."""
        kept = text.lstrip(SPACE)
        if not self._begun and not self._only_tagged and kept[:1] in ("{", "["):
            self._begun = True
            self._candidate = _Candidate(self, text[: len(text) - len(kept)], tagged=False)
            return len(text) - len(kept)
        start = text.find(OPENING)
        if start >= 0:
            self._say(text[:start])
            self._begun = True
            self._candidate = _Candidate(self, OPENING, tagged=True)
            return start + len(OPENING)
        held = 0 if last else next((n for n in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:n])), 0)
        self._say(text[: len(text) - held])
        return len(text) - held

    def _say(self, text: str) -> None:
        """Content; white space at its end waits until it is clear that no call follows."""
        kept = text.rstrip(SPACE)
        if kept:
            self._begun = True
            self._piece.content += self._space + kept
            self._space = ""
        self._space += text[len(kept) :]

    def begin_call(self, name: str) -> int | None:
        """A call is certain: its index, or None if it is one too many."""
        self._space = ""
        if self.num_calls and not self._parallel:
            return None
        self._piece.calls.append(CallPiece(self.num_calls, new_call_id(), name))
        self.num_calls += 1
        return self.num_calls - 1

    def more_arguments(self, index: int | None, text: str) -> None:
        """Of the call with this index."""
        if index is None or not text:
            return
        if not self._piece.calls or self._piece.calls[-1].index != index:
            self._piece.calls.append(CallPiece(index))
        self._piece.calls[-1].arguments += text


class _Candidate:
    """Text that may be calls: one JSON object, or several in a list or one after the other."""

    def __init__(self, reader: ToolReader, lead: str, *, tagged: bool) -> None:
        self.over = False  # no more calls come here
        self._reader = reader
        self._tagged = tagged
        self._held = lead  # is content if no call follows
        self._in_list = False
        self._found = False  # at least one call
        self._scan: ObjectScan | None = None  # the object that is being read
        self._certain = False  # it is a call
        self._index: int | None = None  # this one
        self._sent = 0  # up to where its text has been passed on

    def feed(self, text: str) -> int:
        """Take what belongs to it; returns how much."""
        at = 0
        while at < len(text) and not self.over:
            if self._scan is None and text[at] == "{":
                self._scan, self._certain = ObjectScan(), False
            taken = self._feed_between(text[at:]) if self._scan is None else self._feed_object(self._scan, text[at:])
            at += taken
            if not taken:  # half a closing tag, or the end
                break
        return at

    def leave(self) -> str:
        """What was held back and is no call."""
        held = self._held if self._scan is None or self._certain else self._held + self._scan.text
        if self._found and not held.strip(SPACE + ",;]"):
            return held.translate(SEPARATORS)
        return held

    def _feed_between(self, text: str) -> int:
        """Outside of objects: brackets, separators and the closing tag."""
        if self._tagged and self._found and not self._in_list and CLOSING.startswith(text[: len(CLOSING)]):
            if text.startswith(CLOSING):
                self.over, self._held = True, ""
                return len(CLOSING)
            return 0
        if self._in_list:
            expected = ",]"
        elif self._found:
            expected = "" if self._tagged else ";"
        else:
            expected = "["
        if text[0] not in SPACE + expected:
            self.over = True
            return 0
        if text[0] in "[]":
            self._in_list = text[0] == "["
        self._held += text[0]
        return 1

    def _feed_object(self, scan: ObjectScan, text: str) -> int:
        taken = scan.feed(text)
        if not self._certain:
            self.over = not self._may_be_call(scan) or (scan.at is At.DONE and not self._certain and not self._is_call(scan))
        if self._certain:
            self._send(scan)
        if scan.at is At.BROKEN:  # a call all the same, if it was one
            self.over = True
        elif scan.at is At.DONE and self._certain:
            self._scan, self._held = None, ""
        return taken

    def _may_be_call(self, scan: ObjectScan) -> bool:
        """Decide as soon as it can be decided."""
        if scan.at is At.BROKEN or (scan.key is not None and scan.key not in KEYS):
            return False
        if "name" in scan.members:
            name = _loaded(scan.text[slice(*scan.members["name"])])
            if name not in self._reader.names:
                return False
            start = next((scan.members[key][0] for key in ARGUMENTS if key in scan.members), None)
            if start is None and scan.key in ARGUMENTS and scan.at is At.IN_NESTED:
                start = scan.value_start
            if start is not None and scan.text[start] == "{":
                self._begin(name)
                self._sent = start
        return True

    def _is_call(self, scan: ObjectScan) -> bool:
        """An object that could be understood at its end alone."""
        name, arguments = _call_in(_loaded(scan.text), needs_arguments=not self._tagged)
        if name is None or name not in self._reader.names:
            return False
        self._begin(name)
        self._reader.more_arguments(self._index, arguments)
        self._sent = len(scan.text)
        return True

    def _begin(self, name: str) -> None:
        self._certain = self._found = True
        self._held = ""
        self._index = self._reader.begin_call(name)

    def _send(self, scan: ObjectScan) -> None:
        """Pass on what is new of the arguments."""
        end = next((scan.members[key][1] for key in ARGUMENTS if key in scan.members), len(scan.text))
        if end > self._sent:
            self._reader.more_arguments(self._index, scan.text[self._sent : end])
            self._sent = end


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_in(value: Any, *, needs_arguments: bool) -> tuple[str | None, str]:
    """Name and arguments of an object in one of the forms that models use; no name if it has none of them."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, ""
    arguments: Any = next((value[key] for key in ARGUMENTS if key in value), None if needs_arguments else {})
    if isinstance(arguments, str):  # JSON within JSON
        return (value["name"], arguments) if isinstance(_loaded(arguments), dict) else (None, "")
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else (None, "")

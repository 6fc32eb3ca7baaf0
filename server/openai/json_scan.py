"""`ObjectScan`: a JSON object as it is being written, character by character, so that a value can be passed on before it is whole.

It finds members and their ends; what is inside nested values is not checked. Must not know: what the object means.
"""

from __future__ import annotations

import json
from enum import Enum, auto


class At(Enum):
    """Where in the object the text ends."""

    START = auto()
    KEY = auto()  # before a key, or the end of an empty object
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_STRING = auto()
    IN_NESTED = auto()
    IN_SCALAR = auto()
    NEXT = auto()  # after a value
    DONE = auto()
    BROKEN = auto()  # no JSON object


SPACE = " \t\r\n"


class ObjectScan:
    """Feed it text. `members`: of whole values by key, from and to where they stand in `text`."""

    def __init__(self) -> None:
        self.text = ""
        self.at = At.START
        self.key: str | None = None  # of the value that is being read, or was read last
        self.value_start = 0
        self.members: dict[str, tuple[int, int]] = {}
        self._key_start = 0
        self._depth = 0
        self._quoted = False  # in a string, of a nested value
        self._escaped = False

    @property
    def over(self) -> bool:
        """It takes no more."""
        return self.at in (At.DONE, At.BROKEN)

    def feed(self, text: str) -> int:
        """Take text up to where `at` changes, or before what no object has there; returns how much."""
        before, base = self.at, len(self.text)
        self.text += text
        for number, character in enumerate(text):
            self._take(character, base + number)
            if self.at is not before:
                taken = number + (self.at is not At.BROKEN)
                self.text = self.text[: base + taken]
                return taken
        return len(text)

    def _take(self, character: str, position: int) -> None:
        match self.at:
            case At.IN_NESTED:
                self._take_nested(character, position)
            case At.IN_STRING | At.IN_KEY:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._end_string(position + 1)
            case At.IN_SCALAR:
                if character in SPACE or character in ",}":
                    self._end_value(position)
                    self._take(character, position)
            case _ if character in SPACE:
                pass
            case At.START:
                self.at = At.KEY if character == "{" else At.BROKEN
            case At.KEY:
                self._key_start = position
                empty = character == "}" and not self.members
                self.at = At.IN_KEY if character == '"' else At.DONE if empty else At.BROKEN
            case At.COLON:
                self.at = At.VALUE if character == ":" else At.BROKEN
            case At.VALUE:
                self._begin_value(character, position)
            case At.NEXT:
                self.at = {",": At.KEY, "}": At.DONE}.get(character, At.BROKEN)

    def _take_nested(self, character: str, position: int) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value(position + 1)

    def _begin_value(self, character: str, position: int) -> None:
        self.value_start = position
        if character == '"':
            self.at = At.IN_STRING
        elif character in "{[":
            self.at, self._depth = At.IN_NESTED, 1
        else:
            self.at = At.BROKEN if character in ",}]:" else At.IN_SCALAR

    def _end_string(self, end: int) -> None:
        if self.at is At.IN_STRING:
            self._end_value(end)
            return
        try:
            self.key = json.loads(self.text[self._key_start : end])
        except ValueError:
            self.at = At.BROKEN
        else:
            self.at = At.BROKEN if self.key in self.members else At.COLON

    def _end_value(self, end: int) -> None:
        if self.key is not None:
            self.members[self.key] = (self.value_start, end)
        self.at = At.NEXT

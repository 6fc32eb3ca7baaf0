"""Which logged request goes on from which: turns of one conversation, whose prompts grow by an answer and a question.

Messages say it best: a request whose messages begin with all those of another one, followed by an answer, goes on from that one. They are
compared by hashes, which are dropped with the ids of conversations as soon as the log is read. Must not know: files, tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

CONVERSATION_NAMES = ("conversationid", "sessionid", "chatid", "threadid")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """Lengths in tokens; of a later turn, `input_len` is that of its new ones."""

    input_len: int
    output_len: int
    time: float | None = None  # seconds from some start
    after: int | None = None  # the request in the log that it goes on from


@dataclass(frozen=True, slots=True)
class Turn:
    """What tells a request's place in its conversation; "" where the log does not say."""

    conversation: str = ""  # its id
    messages: str = ""  # hash of all of them
    before: tuple[str, ...] = ()  # hashes of those before each of the assistant's, longest first


def turn_of(parts: Iterable[Mapping[str, Any]]) -> Turn:
    """Of a log's entry, given the objects in it that hold a request or a response."""
    conversation, messages = "", ""
    before: list[str] = []
    for part in parts:
        conversation = conversation or _conversation(part)
        if not messages and isinstance(said := part.get("messages"), list) and said:
            digest = hashlib.sha256()
            for number, message in enumerate(said):
                role, content = _heard(message)
                if number and role == "assistant":
                    before.insert(0, digest.hexdigest())
                digest.update(content)
            messages = digest.hexdigest()
    return Turn(conversation, messages, tuple(before))


def linked(requests: Sequence[LoggedRequest], turns: Sequence[Turn]) -> list[LoggedRequest]:
    """The requests, whose lengths are those of whole prompts, with later turns put after the ones that they go on from.

    A later turn has at least one new token; where an id alone speaks for it and its prompt is too short to hold what was said before, it is
    a request of its own.
    """
    found = list(requests)
    by_messages: dict[tuple[str, str], int] = {}
    by_conversation: dict[str, int] = {}
    for index in in_time(requests):
        request, turn = requests[index], turns[index]
        known = [place for digest in turn.before if (place := by_messages.get((turn.conversation, digest))) is not None]
        after = known[0] if known else by_conversation.get(turn.conversation)
        if after is not None:
            new = request.input_len - requests[after].input_len - requests[after].output_len
            if known or new > 0:
                found[index] = replace(request, input_len=max(1, new), after=after)
        if turn.messages:
            by_messages[turn.conversation, turn.messages] = index
        if turn.conversation:
            by_conversation[turn.conversation] = index
    return found


def in_time(requests: Sequence[LoggedRequest]) -> list[int]:
    """Their places in the order of their times; without the time of one of them, in the log's."""
    if any(request.time is None for request in requests):
        return list(range(len(requests)))
    return sorted(range(len(requests)), key=lambda index: requests[index].time or 0.0)


def texts_of(content: Any) -> Iterator[str]:
    """Of a message's content: a text, or parts of which some are."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]


def _conversation(part: Mapping[str, Any]) -> str:
    for fields in (part, part.get("metadata")):
        for name, value in fields.items() if isinstance(fields, Mapping) else ():
            if re.sub(r"[^a-z]", "", name.lower()) in CONVERSATION_NAMES and isinstance(value, str | int) and value != "":
                return str(value)
    return ""


def _heard(message: Any) -> tuple[str, bytes]:
    """Who says it, and what, however it is written."""
    if not isinstance(message, Mapping):
        return "", b"null"
    role = str(message.get("role"))
    said = [role, list(texts_of(message.get("content"))), message.get("tool_calls"), message.get("tool_call_id")]
    return role, json.dumps(said, sort_keys=True).encode()

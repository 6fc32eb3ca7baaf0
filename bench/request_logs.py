"""Request logs as people have them, read for lengths, times and which turn followed which; text is counted and let go.

OpenAI-style JSONL (one request a line, with `usage`, or text that a tokenizer counts), ShareGPT's JSON, and CSV or JSONL of lengths
(Azure's, BurstGPT's and Mooncake's traces among them). Errors name the line and never quote it. Must not know: buckets, workloads.

In a JSONL log each turn of a conversation is a request of its own, whose prompt is all that was said before. Which one it goes on from is
told by the messages, or else by the id of the conversation (`bench.logged_turns`).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.bench.logged_turns import LoggedRequest, Turn, linked, texts_of, turn_of
from octavo.core.errors import RequestError

Encode = Callable[[str], list[int]]

INPUT_NAMES = (
    "inputlen", "inputlength", "inputtokens", "numinputtokens", "promptlen", "promptlength", "prompttokens", "numprompttokens",
    "contexttokens", "requesttokens", "numprefilltokens",
)  # fmt: skip
OUTPUT_NAMES = (
    "outputlen", "outputlength", "outputtokens", "numoutputtokens", "completiontokens", "generatedtokens", "responsetokens",
    "numdecodetokens",
)  # fmt: skip
TIME_NAMES = ("timestamp", "time", "arrival", "arrivaltime", "arrivedat", "created", "createdat", "at")
MILLISECONDS = 1e11  # a number of seconds beyond this is one of milliseconds; as a date it would be in the year 5138


@dataclass(slots=True)
class RequestLog:
    """What a file holds. `skipped` lines had no lengths: refused or failed requests, mostly."""

    requests: list[LoggedRequest] = field(default_factory=list)
    skipped: int = 0


def read_log(path: str | Path, *, encode: Encode | None = None) -> RequestLog:
    """Read a file of any of these kinds; which one its content says. Raises RequestError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError(f"the log {path} cannot be read: {reason}", field="trace") from None
    start = text.lstrip()[:1]
    if start == "[":
        log = _conversations(path, text, encode)
    elif start == "{":
        log = _lines(path, text, encode)
    else:
        log = _table(path, text)
    if not log.requests:
        raise RequestError(f"the log {path} has no request with lengths ({log.skipped} lines without)", field="trace")
    return log


def _table(path: str | Path, text: str) -> RequestLog:
    rows = csv.reader(io.StringIO(text))
    names = [_plain(name) for name in next(rows, [])]
    if not set(names) & set(INPUT_NAMES) or not set(names) & set(OUTPUT_NAMES):
        raise RequestError(
            f"the log {path} is neither JSON nor a CSV file whose first line names columns like input_len, output_len and timestamp",
            field="trace",
        )
    log = RequestLog()
    for row in rows:
        _add(log, _from_fields(dict(zip(names, row, strict=False)), f"{path}, line {rows.line_num}"))
    return log


def _lines(path: str | Path, text: str, encode: Encode | None) -> RequestLog:
    log, turns = RequestLog(), list[Turn]()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise RequestError(f"{path}, line {number}: not a JSON object; a JSONL log has one a line", field="trace") from None
        request = _from_entry(entry, f"{path}, line {number}", encode) if isinstance(entry, dict) else None
        _add(log, request)
        if request is not None:
            turns.append(turn_of(_parts(entry)))
    log.requests = linked(log.requests, turns)
    return log


def _add(log: RequestLog, request: LoggedRequest | None) -> None:
    if request is None:
        log.skipped += 1
    else:
        log.requests.append(request)


def _from_entry(entry: Mapping[str, Any], where: str, encode: Encode | None) -> LoggedRequest | None:
    parts = list(_parts(entry))
    time = next((when for part in parts if (when := _time(_plainly(part), where)) is not None), None)
    for part in parts:
        for fields in (part.get("usage"), part):
            if isinstance(fields, Mapping) and (found := _from_fields(_plainly(fields), where)) is not None:
                return LoggedRequest(found.input_len, found.output_len, found.time if time is None else time)
    said = [text for part in parts for text in _asked(part)]
    made = [text for part in parts for text in _answered(part)]
    if not said or not made:
        return None
    if encode is None:
        raise RequestError(f"{where}: no usage, and no tokenizer to count its text with; name one with --model", field="trace")
    return LoggedRequest(sum(len(encode(text)) for text in said), sum(len(encode(text)) for text in made), time)


def _parts(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The object and those in it that hold a request or a response, batch files' `body` included."""
    yield entry
    for name in ("request", "response", "body"):
        if isinstance(inner := entry.get(name), Mapping):
            yield from _parts(inner)


def _asked(part: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(prompt := part.get("prompt"), str):
        yield prompt
    messages = part.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            yield from texts_of(message.get("content"))


def _answered(part: Mapping[str, Any]) -> Iterator[str]:
    choices = part.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping):
            message = choice.get("message")
            yield from texts_of(message.get("content") if isinstance(message, Mapping) else choice.get("text"))


def _from_fields(fields: Mapping[str, Any], where: str) -> LoggedRequest | None:
    size, output = (
        next((fields[name] for name in names if fields.get(name) not in (None, "")), None) for names in (INPUT_NAMES, OUTPUT_NAMES)
    )
    if size is None or output is None:
        return None
    try:
        lengths = int(float(size)), int(float(output))
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{where}: its lengths are not numbers of tokens", field="trace") from None
    if min(lengths) < 1:
        return None
    return LoggedRequest(*lengths, _time(fields, where))


def _time(fields: Mapping[str, Any], where: str) -> float | None:
    value = next((fields[name] for name in TIME_NAMES if fields.get(name) not in (None, "")), None)
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            raise RequestError(f"{where}: its time is neither a number of seconds nor an ISO date", field="trace") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return seconds / 1000 if abs(seconds) > MILLISECONDS else seconds


def _plainly(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {_plain(name): value for name, value in fields.items()}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _conversations(path: str | Path, text: str, encode: Encode | None) -> RequestLog:
    log = RequestLog()
    for conversation in read_conversations(path, text):
        if encode is None:
            raise RequestError(
                f"{path} has text and no lengths, and there is no tokenizer to count it with; name one with --model", field="trace"
            )
        after = None
        for question, answer in conversation:
            size, output = len(encode(question)), len(encode(answer))
            if not size or not output:
                log.skipped += 1
                break
            log.requests.append(LoggedRequest(size, output, None, after))
            after = len(log.requests) - 1
    return log


def read_conversations(path: str | Path, text: str | None = None) -> list[list[tuple[str, str]]]:
    """ShareGPT's JSON: of each conversation, its questions with their answers, from the first question on. Raises RequestError."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8-sig") if text is None else text)
        turns = [[(turn["from"], turn["value"]) for turn in entry["conversations"]] for entry in entries]
        if not all(isinstance(word, str) for conversation in turns for turn in conversation for word in turn):
            raise TypeError("a turn is not text")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", field="path") from None
    except (ValueError, TypeError, KeyError):
        raise RequestError(
            f'{path} is not ShareGPT\'s JSON: a list of objects with "conversations", a list of turns with "from" and "value"', field="path"
        ) from None
    return [_pairs(conversation) for conversation in turns]


def _pairs(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Questions with answers, as far as they alternate; what stands before the first question is left out."""
    start = next((index for index, (who, _) in enumerate(turns) if who in ("human", "user")), len(turns))
    pairs = []
    for (asker, question), (answerer, answer) in zip(turns[start::2], turns[start + 1 :: 2], strict=False):
        if asker not in ("human", "user") or answerer not in ("gpt", "assistant", "chatgpt", "bing", "bard"):
            break
        pairs.append((question, answer))
    return pairs

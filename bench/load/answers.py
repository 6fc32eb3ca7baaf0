"""A server's answer becomes what a `RequestRecord` says of it.

Must not know: when and how it was asked for.
"""

from __future__ import annotations

from typing import Any

from octavo.bench.load.client import Record
from octavo.bench.records import RequestRecord

REFUSALS = (400, 401, 403, 404, 413, 422, 429, 503)
TIMEOUTS = (408, 504)


def fill(record: RequestRecord, answer: Record, *, zero: float) -> RequestRecord:
    """Put into the record what the answer says; `zero` is the run's start on the client's clock. Doing it twice changes nothing."""
    record.token_times, record.token_ids, record.status = [], [], answer.answer.status
    try:
        _read(record, answer, zero)
        record.error = answer.error or ("" if answer.streamed else "an answer in one piece, though a stream was asked for")
    except Exception:  # whatever a server may send, no other record is lost for it
        record.error = answer.broken or f"status {answer.answer.status}, and not what an OpenAI-compatible server answers"
    if record.error:
        record.finish_reason = _reason(answer)
    return record


def text_of(answer: Record) -> str:
    """The text of its one choice."""
    return answer.texts.get(0, "")


def _read(record: RequestRecord, answer: Record, zero: float) -> None:
    events: list[float] = []  # that brought text
    counted: int | None = None
    for when, content in answer.events if answer.streamed else ():
        if content == "[DONE]":
            continue
        if usage := content.get("usage"):
            counted, record.num_prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
            record.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        for choice in content.get("choices") or ():
            if ids := choice.get("token_ids"):
                record.token_ids += ids
                record.token_times += [when - zero] * len(ids)
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                events.append(when - zero)
            if choice.get("finish_reason"):
                record.finish_reason = str(choice["finish_reason"])
    if not record.token_times:
        record.token_times, record.num_counted = events, counted


def _reason(answer: Record) -> str:
    status: Any = answer.answer.status
    if status in TIMEOUTS or "no whole answer within" in answer.broken:
        return "timeout"
    return "refused" if status in REFUSALS else "error"

"""Traces: a request log reduced to joint length buckets and gaps, without text, ids or dates; and back to requests of random tokens.

A trace is a JSON file. Each request is one row: milliseconds since the one before, the bucket of its prompt, that of its output, and how
many rows before it stands the turn that it goes on from (0: none). A bucket is a range of lengths, each a fifth longer than the last; a
replayed length is drawn from its bucket. Must not know: engines, tokenizers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.arrivals import in_order
from octavo.bench.drawing import Draw
from octavo.bench.logged_turns import in_time
from octavo.bench.request_logs import Encode, RequestLog, read_log
from octavo.bench.whole_files import write_whole
from octavo.bench.work import Item
from octavo.core.errors import RequestError

FORMAT, VERSION = "octavo-trace", 1
GROWTH = 1.2  # from one bucket's first length to the next one's


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    gap_ms: int
    input_bucket: int
    output_bucket: int
    back: int  # rows before it; 0: a request of its own


@dataclass(frozen=True, slots=True)
class Trace:
    """`bounds` are the first lengths of the buckets; the last is the end of the last one."""

    bounds: tuple[int, ...]
    rows: tuple[Row, ...]

    def lengths(self, bucket: int) -> tuple[int, int]:
        """The shortest and the longest of a bucket."""
        return self.bounds[bucket], self.bounds[bucket + 1] - 1


def bucket_bounds(longest: int) -> tuple[int, ...]:
    """1, 2, 3 ... as long as a fifth is less than one, then each a fifth more, until beyond the longest."""
    bounds = [1]
    while bounds[-1] <= longest:
        bounds.append(max(bounds[-1] + 1, round(bounds[-1] * GROWTH)))
    return tuple(bounds)


def anonymise(log: RequestLog) -> Trace:
    """What may leave the house. Requests are in the order of their times, which are kept as gaps; without times they are in the log's."""
    requests = log.requests
    timed = all(request.time is not None for request in requests)
    order = in_time(requests)
    place = {index: position for position, index in enumerate(order)}
    bounds = bucket_bounds(max(max(request.input_len, request.output_len) for request in requests))
    rows: list[Row] = []
    last = requests[order[0]].time or 0.0
    for position, index in enumerate(order):
        request = requests[index]
        now = (request.time or 0.0) if timed else last
        back = position - place[request.after] if request.after is not None else 0
        rows.append(Row(round((now - last) * 1000), _bucket(bounds, request.input_len), _bucket(bounds, request.output_len), max(0, back)))
        last = now
    return Trace(bounds, tuple(rows))


def _bucket(bounds: tuple[int, ...], length: int) -> int:
    return next(index for index in range(len(bounds) - 1) if length < bounds[index + 1])


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write it. Raises OSError."""
    rows = [[row.gap_ms, row.input_bucket, row.output_bucket, row.back] for row in trace.rows]
    content = {"format": FORMAT, "version": VERSION, "bounds": trace.bounds, "columns": ["gap_ms", "input", "output", "back"], "rows": rows}
    write_whole(path, json.dumps(content, separators=(",", ":")) + "\n")


def load_trace(path: str | Path, *, encode: Encode | None = None) -> Trace:
    """A trace, or a log reduced to one. Raises RequestError."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise RequestError(f"the trace {path} cannot be read: {error.strerror}", field="path") from None
    if FORMAT.encode() not in head:
        return anonymise(read_log(path, encode=encode))
    try:
        content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        version, bounds = content["version"], tuple(int(bound) for bound in content["bounds"])
        rows = tuple(Row(*map(int, row)) for row in content["rows"])
    except (ValueError, TypeError, KeyError):
        raise RequestError(f"the trace {path} is damaged: make it anew with `octavo trace anonymise`", field="path") from None
    if version != VERSION:
        raise RequestError(f"the trace {path} is of version {version}, this Octavo reads version {VERSION}", field="path")
    fits = all(0 <= row.input_bucket < len(bounds) - 1 and 0 <= row.output_bucket < len(bounds) - 1 for row in rows)
    if not rows or not fits or any(row.back > index or row.back < 0 or row.gap_ms < 0 for index, row in enumerate(rows)):
        raise RequestError(f"the trace {path} is damaged: a row names a bucket or a row that is not there", field="path")
    return Trace(bounds, rows)


def replay(draw: Draw, trace: Trace, *, time_scale: float = 1.0) -> list[Item]:
    """The first rows, at their own times multiplied by `time_scale`, with random tokens. A turn waits for the one it goes on from."""
    lengths, tokens = draw.stream("lengths"), draw.stream("tokens")
    items: list[Item] = []
    now = 0
    for index, row in enumerate(trace.rows[: draw.count]):
        now += row.gap_ms if index else 0
        items.append(
            Item(
                prompt=draw.tokens(tokens, lengths.randint(*trace.lengths(row.input_bucket))),
                output_len=lengths.randint(*trace.lengths(row.output_bucket)),
                at=now * time_scale / 1000,
                after=index - row.back if row.back else None,
            )
        )
    return in_order(items)

"""Server-sent events: the examples of the WHATWG's own text, however the lines end and wherever the reads are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from octavo.bench.load.sse import EventReader

EXAMPLES = {
    "data: YHOO\ndata: +2\ndata: 10\n\n": ["YHOO\n+2\n10"],
    ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n": ["first event", "second event"],
    "data\n\ndata\ndata\n\ndata:": ["", "\n"],
    "data:test\n\ndata: test\n\n": ["test", "test"],
    "event: add\ndata: 73857293\n\nevent: remove\ndata: 2153\n\nretry: 10\n\n": ["73857293", "2153"],
}
"""Of https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream, and what the text says of each."""


def read(stream: bytes, *cuts: int) -> list[str]:
    """The stream in pieces."""
    reader, places = EventReader(), sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    return [data for start, stop in pairwise(places) for data in reader.feed(stream[start:stop])]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("stream", EXAMPLES)
@given(cuts=st.lists(st.integers(0, 150)))
def test_the_examples(stream: str, end: str, cuts: list[int]) -> None:
    """An event that the stream's end cuts off is none; a byte order mark is no part of the first line."""
    sent = stream.replace("\n", end).encode()
    assert read(sent, *cuts) == read(b"\xef\xbb\xbf" + sent, *cuts) == EXAMPLES[stream]


def test_an_event_is_whole_at_the_return_that_ends_it() -> None:
    """The newline that belongs to it may come much later, and is no empty line of the next event."""
    reader = EventReader()
    assert [reader.feed(piece) for piece in (b"data: a\r", b"\n\r", b"\ndata: b\r\n", b"", b"\r", b"\n")] == [[], ["a"], [], [], ["b"], []]


def test_characters_of_several_bytes() -> None:
    """Are one where a read cuts them; what is no UTF-8 is replaced, and the stream goes on."""
    assert read("data: é€\n\n".encode(), 7, 9) == ["é€"]
    assert read(b"data: \xff\n\ndata: b\n\n") == ["�", "b"]

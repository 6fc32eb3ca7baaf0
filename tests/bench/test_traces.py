"""Request logs become traces without text, and traces requests. What a log says of people must not survive."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from octavo.bench.drawing import Draw
from octavo.bench.logged_turns import LoggedRequest
from octavo.bench.request_logs import RequestLog, read_log
from octavo.bench.traces import anonymise, bucket_bounds, load_trace, replay, save_trace
from octavo.bench.work import Work, prompt_of
from octavo.core.errors import RequestError


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def written(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def lengths(log: RequestLog) -> list[tuple[int, int, float | None]]:
    return [(request.input_len, request.output_len, request.time) for request in log.requests]


JSONL = [
    {"timestamp": 10.5, "model": "m", "prompt": "SECRET words", "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}},
    {"created": 11, "request": {"messages": [{"role": "user", "content": "x"}]},
     "response": {"usage": {"prompt_tokens": 4, "completion_tokens": 6}}},
    {"custom_id": "r", "response": {"status_code": 200, "body": {"created": 12, "usage": {"prompt_tokens": 7, "completion_tokens": 1}}}},
    {"time": "1970-01-01T00:00:13+00:00", "body": {"messages": [{"content": [{"type": "text", "text": "a b c"}]}, {"content": "d"}]},
     "response": {"choices": [{"message": {"content": "e f"}}]}},
    {"timestamp": 14, "error": "refused"},
    {"timestamp": 15, "prompt": "one two", "choices": [{"text": "three"}], "usage": None},
]  # fmt: skip


def test_jsonl(tmp_path: Path) -> None:
    """OpenAI-style lines: usage wherever it stands, else text that a tokenizer counts; lines without an answer are counted and left out."""
    path = written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, JSONL)) + "\n\n")
    log = read_log(path, encode=encode)
    assert lengths(log) == [(3, 5, 10.5), (4, 6, 11.0), (7, 1, 12.0), (4, 2, 13.0), (2, 1, 15.0)]
    assert log.skipped == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("input_len,output_len\n3,4\n5,6\n", [(3, 4, None), (5, 6, None)]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n", [(374, 44, 1700158623.97996)]),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n", [(472, 18, 5.0)]),
        ('{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46]}\n', [(6955, 52, 27482.0)]),
        ("\ufefftime,prompt_tokens,completion_tokens\n1700000000000,1,2\n1,0,5\n,,\n", [(1, 2, 1.7e9)]),
    ],
)
def test_lengths_of_public_traces(tmp_path: Path, text: str, expected: list[tuple[int, int, float | None]]) -> None:
    """CSV under the names of Azure's and BurstGPT's traces and others, JSONL under Mooncake's; milliseconds are told from seconds."""
    found = lengths(read_log(written(tmp_path / "log", text)))
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in expected])


def turn(*said: str, answer: str, **fields: Any) -> dict[str, Any]:
    """A logged request: what was said, by the user and the assistant in turn, and how it was answered."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    return {"messages": messages, "choices": [{"message": {"role": "assistant", "content": answer}}], **fields}


def linked(log: RequestLog) -> list[tuple[int, int, int | None]]:
    return [(one.input_len, one.output_len, one.after) for one in log.requests]


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output}


def test_conversations_of_a_jsonl_log(tmp_path: Path) -> None:
    """Each line has all that was said before. Two chats side by side, one asked again in another way, and one that begins like another."""
    entries = [
        turn("a b", answer="c d e"),
        turn("x", answer="y"),
        turn("a b", "c d e", "f", answer="g"),
        turn("x", "y", "z z", answer="w"),
        turn("a b", "c d e", "f f", answer="g g"),
        turn("a b", "c d e", "f", "g", "h h h", answer="i"),
        turn("a b c", "d", "e", answer="f"),
        turn("alone", answer="b"),
        turn("alone", "b", "c", "d", "e", answer="f"),  # the turn between is not in the log
    ]
    log = read_log(written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, entries))), encode=encode)
    assert linked(log) == [
        (2, 3, None), (1, 1, None), (1, 1, 0), (2, 1, 1), (2, 2, 0), (3, 1, 2), (5, 1, None), (1, 1, None), (3, 1, 7),
    ]  # fmt: skip
    items = replay(Draw(count=9, seed=0, vocab_size=1000), anonymise(log))
    assert [item.after for item in items] == [None, None, 0, 1, 0, 2, None, None, 7]
    work = Work(name="trace", items=items)
    assert [work.prompt_len(n) for n in range(9)] == [2, 1, 6, 4, 7, 10, 5, 1, 5]


def test_turns_that_were_logged_out_of_order(tmp_path: Path) -> None:
    """Go on from the turn before by time; usage says the lengths, and parts and strings of one text are the same."""
    parts = [{"type": "text", "text": "a"}]
    entries = [
        turn("a", "b", "c", answer="d", usage=usage(30, 5), timestamp=20.0),
        {"messages": [{"role": "user", "content": parts}], "usage": usage(9, 1), "timestamp": 10.0},
        turn("a", "b", "c", "d", "e", answer="f", usage=usage(34, 5), timestamp=30.0),
    ]
    log = read_log(written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, entries))))
    assert linked(log) == [(20, 5, 1), (9, 1, None), (1, 5, 0)]  # the last one's answer was shortened when it came back
    assert [item.after for item in replay(Draw(count=9, seed=0, vocab_size=1000), anonymise(log))] == [None, 0, 1]


@pytest.mark.parametrize("name", ["conversation_id", "sessionId", "chat-id", "metadata"])
def test_conversations_by_their_ids(name: str, tmp_path: Path) -> None:
    """Where a log has no messages; a prompt that is too short to hold what came before is one of its own."""
    ids = ["k", "q", "k", "k", "q", ""]
    lengths = [(10, 5), (10, 5), (40, 5), (20, 5), (16, 1), (100, 1)]
    entries = [
        {name: {"thread_id": one} if name == "metadata" else one, "usage": usage(*length)} for one, length in zip(ids, lengths, strict=True)
    ]
    log = read_log(written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, entries))))
    assert linked(log) == [(10, 5, None), (10, 5, None), (25, 5, 0), (20, 5, None), (1, 1, 1), (100, 1, None)]


def test_the_same_words_in_two_conversations(tmp_path: Path) -> None:
    """Are told apart by their ids."""
    entries = [
        turn("a", answer="b", conversation_id="k"),
        turn("a", answer="b", conversation_id="q"),
        turn("a", "b", "c", answer="d", conversation_id="k"),
    ]
    log = read_log(written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, entries))), encode=encode)
    assert linked(log) == [(1, 1, None), (1, 1, None), (1, 1, 0)]


def test_calls_of_tools_are_compared_too(tmp_path: Path) -> None:
    """They have no text of their own."""

    def call(name: str) -> list[dict[str, Any]]:
        made = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": name, "arguments": "{}"}}]}
        return [{"role": "user", "content": "a"}, made, {"role": "tool", "tool_call_id": "1", "content": "r"}]

    entries = [
        {"messages": call("f"), "usage": usage(20, 2)},
        {"messages": [*call("g"), {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "usage": usage(30, 2)},
        {"messages": [*call("f"), {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "usage": usage(30, 2)},
    ]
    log = read_log(written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, entries))))
    assert linked(log) == [(20, 2, None), (30, 2, None), (8, 2, 0)]


def test_a_long_conversation_is_replayed() -> None:
    """Of more turns than Python lets a function call itself."""
    log = RequestLog([LoggedRequest(1, 1, None, number - 1 if number else None) for number in range(3000)])
    work = Work(name="trace", items=replay(Draw(count=3000, seed=0, vocab_size=1000), anonymise(log)))
    assert work.prompt_len(2999) == 5999
    assert len(prompt_of(work, 2999, {number: [7] for number in range(2999)})) == 5999


def test_sharegpt_conversations(tmp_path: Path) -> None:
    """Each turn has its new tokens and the turn that it goes on from; what comes before the first question is no turn."""
    entries = [
        {"id": "x", "conversations": [
            {"from": "gpt", "value": "hello"}, {"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"},
            {"from": "human", "value": "d"}, {"from": "gpt", "value": "e f g"}, {"from": "human", "value": "unanswered"},
        ]},
        {"id": "y", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
        {"id": "z", "conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "r"}]},
    ]  # fmt: skip
    log = read_log(written(tmp_path / "s.json", json.dumps(entries)), encode=encode)
    assert [(one.input_len, one.output_len, one.after) for one in log.requests] == [(2, 1, None), (1, 3, 0), (1, 1, None)]
    assert log.skipped == 1


def test_no_text_and_no_id_survives(tmp_path: Path) -> None:
    """Nothing of a log's words, names, ids, keys or dates is in the trace: it holds numbers and eight words of its own."""
    rng = random.Random(1)
    word = lambda: "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7))  # noqa: E731
    entries: list[dict[str, Any]] = []
    for number in range(60):
        text, answer = (" ".join(word() for _ in range(rng.randint(1, 30))) for _ in range(2))
        entries.append(
            {
                "conversation_id": f"{word()}-{number // 3}",
                "id": f"req-{word()}", "user": f"{word()}@example.org", "ip": "203.0.113.77", "api_key": f"sk-{word()}",
                "timestamp": 1699999999.123 + number * 1.7, "request": {"messages": [{"role": "user", "content": text}]},
                "response": {"id": word(), "choices": [{"message": {"content": answer}}]},
            }
        )  # fmt: skip
    path = written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, entries)))
    save_trace(anonymise(read_log(path, encode=encode)), tmp_path / "trace.json")
    trace = (tmp_path / "trace.json").read_text()
    assert set(re.findall(r"[A-Za-z_-]{2,}", trace)) == {
        "format", "octavo-trace", "version", "bounds", "columns", "gap_ms", "input", "output", "back", "rows",
    }  # fmt: skip
    words = set(re.findall(r"[a-z]{7}", path.read_text())) - {"content", "request", "example", "message"}
    assert len(words) > 1000 and not any(one in trace for one in words)
    assert "16999" not in trace and "203.0" not in trace and "123" not in re.findall(r"\d+", trace)


def test_a_length_is_told_to_a_fifth(tmp_path: Path) -> None:
    """Two lengths of one bucket give the same trace, byte for byte."""
    files = []
    for number, length in enumerate((1000, 1010)):
        save_trace(anonymise(RequestLog([LoggedRequest(length, 100, 5.0), LoggedRequest(20, 5000, 7.5)])), tmp_path / f"{number}")
        files.append((tmp_path / f"{number}").read_bytes())
    assert files[0] == files[1]


@given(st.integers(1, 200_000))
def test_buckets_leave_nothing_out(length: int) -> None:
    """Each length is in one bucket, which is no wider than a fifth, or than one token."""
    bounds = bucket_bounds(length)
    assert bounds[0] == 1 and bounds[-1] > length >= bounds[-2]
    assert all(high - low <= max(1, round(low * 0.2) + 1) for low, high in pairwise(bounds))


REQUESTS = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 3000), st.integers(0, 100_000)), min_size=1, max_size=30)


@given(REQUESTS, st.integers(0, 99))
def test_a_replay_has_the_same_buckets_and_gaps(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]], seed: int
) -> None:
    """Through a file and back: as many requests of each joint bucket, in the order of their times, with their gaps."""
    trace = anonymise(RequestLog([LoggedRequest(size, output, time / 1000) for size, output, time in drawn]))
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    save_trace(trace, path)
    assert load_trace(path) == trace
    items = replay(Draw(count=len(drawn), seed=seed, vocab_size=1000), trace)
    again = anonymise(RequestLog([LoggedRequest(len(item.prompt), item.output_len, item.at) for item in items]))
    joint = [Counter((trace.bounds[row.input_bucket], trace.bounds[row.output_bucket]) for row in one.rows) for one in (trace, again)]
    assert joint[0] == joint[1]
    first = min(time for _, _, time in drawn)
    assert [item.at for item in items] == pytest.approx(sorted((time - first) / 1000 for _, _, time in drawn), abs=0.002 * len(drawn))


def test_conversations_are_replayed(tmp_path: Path) -> None:
    """A later turn still goes on from the one before it."""
    log = RequestLog([LoggedRequest(5, 2), LoggedRequest(6, 3), LoggedRequest(2, 4, None, 0), LoggedRequest(3, 1, None, 2)])
    items = replay(Draw(count=9, seed=0, vocab_size=1000), anonymise(log))
    assert [(len(item.prompt), item.after) for item in items] == [(5, None), (6, None), (2, 0), (3, 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is neither JSON nor a CSV file whose first line names columns like input_len"),
        ("a,b\n1,2\n", "is neither JSON nor a CSV file"),
        ("input_len,output_len\n", "has no request with lengths"),
        ("input_len,output_len\nSECRET,2\n", "line 2: its lengths are not numbers of tokens"),
        ("time,input_len,output_len\nSECRET,1,2\n", "line 2: its time is neither a number of seconds nor an ISO date"),
        ('{"a": 1}\n{SECRET\n', "line 2: not a JSON object"),
        ('{"prompt": "SECRET", "choices": [{"text": "SECRET"}]}', "line 1: no usage, and no tokenizer to count its text with"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', "is not ShareGPT's JSON"),
        ('[{"conversations": [{"from": "human", "value": "SECRET"}, {"from": "gpt", "value": "b"}]}]', "has text and no lengths"),
        ('{"format":"octavo-trace","version":2,"bounds":[1,2],"rows":[[0,0,0,0]]}', "is of version 2, this Octavo reads version 1"),
        ('{"format":"octavo-trace","version":1,"bounds":[1,2],"rows":[[0,5,0,0]]}', "a row names a bucket or a row that is not there"),
        ('{"format":"octavo-trace","version":1,"bounds":[1,2],"rows":[[0,0,0,1]]}', "a row names a bucket or a row that is not there"),
        ('{"format":"octavo-trace","version":1,"bounds":[1,', "is damaged: make it anew"),
    ],
)  # fmt: skip
def test_what_is_no_log(tmp_path: Path, content: str, message: str) -> None:
    """A clear error, which quotes nothing of the content."""
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        load_trace(written(tmp_path / "log", content))
    assert "SECRET" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Absent, or no text."""
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        read_log(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RequestError, match="cannot be read: it is not UTF-8"):
        read_log(tmp_path / "bytes")

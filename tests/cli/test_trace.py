"""`octavo trace anonymise`, and what comes of its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.runs import Run
from octavo.cli import main


def test_a_log_becomes_a_trace_that_is_replayed(engine_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From JSONL to a run of it, at its own times; a file that is there is not written over unasked."""
    lines = [{"created": n / 100, "user": "SECRET", "usage": {"prompt_tokens": 10 + n, "completion_tokens": 3}} for n in range(6)]
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.json"
    log.write_text("\n".join(map(json.dumps, [*lines, {"error": "no"}])))
    words = ["trace", "anonymise", str(log), str(trace)]
    assert main(words) == 0
    assert "6 requests over 0.1 s in 3 joint length buckets; 1 without lengths left out" in capsys.readouterr().err
    assert "SECRET" not in trace.read_text()
    assert main(words) == 2
    assert "exists already: give another name, or --force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    replay = [
        "bench",
        "serve",
        "--allow-noise",
        *engine_words,
        "--no-probe",
        "--dataset-name",
        "trace",
        "--dataset-path",
        str(trace),
        "--num-prompts",
        "9",
    ]
    assert main([*replay, "--allow-noise", "--trace-time-scale", "0.5", "--allow-noise"]) == 0
    out, err = capsys.readouterr()
    assert "Successful requests:                     6\n" in out and "the workload 'trace' has 6 requests, not 9" in err


def test_chats_of_a_log_find_their_prefixes_again(engine_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log has each turn as a request of its own; replayed, a later turn begins with what was said before, and the cache has it."""
    said = [{"role": ("user", "assistant")[n % 2], "content": f"SECRET {n}"} for n in range(5)]
    lines = [{"messages": said[: 2 * n + 1], "usage": {"prompt_tokens": 24 * (n + 1), "completion_tokens": 4}} for n in range(3)]
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.json"
    log.write_text("\n".join(map(json.dumps, lines)))
    assert main(["trace", "anonymise", str(log), str(trace)]) == 0
    assert "3 requests, 2 of them later turns of conversations, over" in capsys.readouterr().err and "SECRET" not in trace.read_text()
    replay = ["bench", "serve", *engine_words, "--no-probe", "--dataset-name", "trace", "--dataset-path", str(trace), "--num-prompts", "3"]
    assert main([*replay, "--allow-noise", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "run"]) == 0
    records = Run.load(tmp_path / "run").records
    lengths = [record.num_prompt_tokens for record in records]
    assert lengths == sorted(lengths) and 60 <= lengths[2] <= 90
    assert [record.num_cached_tokens > 0 for record in records] == [False, True, True]


def test_text_is_counted_by_a_models_tokenizer(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named with --model; without one, what is missing is said."""
    log = tmp_path / "log.json"
    log.write_text(json.dumps([{"conversations": [{"from": "human", "value": "abcdef"}, {"from": "gpt", "value": "abc"}]}]))
    words = ["trace", "anonymise", str(log), str(tmp_path / "trace.json")]
    assert main(words) == 2
    assert "there is no tokenizer to count it with; name one with --model" in capsys.readouterr().err
    assert main([*words, "--model", str(chat_model)]) == 0
    content = json.loads((tmp_path / "trace.json").read_text())
    (row,) = content["rows"]
    assert [content["bounds"][bucket] for bucket in row[1:3]] == [6, 3]


@pytest.mark.parametrize(
    ("log", "trace", "message"),
    [("nowhere", "out", "the log nowhere cannot be read: No such file"), ("log", "/dev/null/x", "cannot be written")],
)
def test_files_that_cannot_be_used(
    log: str, trace: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error, status 2."""
    monkeypatch.chdir(tmp_path)
    Path("log").write_text("input_len,output_len\n1,2\n")
    assert main(["trace", "anonymise", log, trace]) == 2
    assert message in capsys.readouterr().err

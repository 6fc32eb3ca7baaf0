"""`octavo chat`: a question and its answer, or a conversation, as it is made."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from tests.models import tiny

Messages = list[dict[str, str]]


@pytest.fixture
def words(engine_words: list[str]) -> list[str]:
    return [*engine_words, "--max-tokens", "6"]


def answers(folder: Path, questions: list[str], *, system: str | None = None) -> list[str]:
    """The conversation as `LLM.chat` leads it."""
    messages: Messages = [{"role": "system", "content": system}] if system else []
    made = []
    with LLM(folder, device="cpu", dtype="float32", max_model_len=128, num_kv_slots=256) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
            made.append(output.outputs[0].text)
            messages.append({"role": "assistant", "content": made[-1]})
    return made


def test_one_question(chat_model: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The answer alone on standard output, with the system message if there is one."""
    assert main(["chat", "Hi", *words]) == 0
    assert capsys.readouterr().out == f"{answers(chat_model, ['Hi'])[0]}\n"
    assert main(["chat", "Hi", "--system", "Be brief.", *words]) == 0
    assert capsys.readouterr().out == f"{answers(chat_model, ['Hi'], system='Be brief.')[0]}\n"


def test_a_conversation(chat_model: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn sees those before it; an empty line ends it, and so does the end of input."""
    expected = "".join(f"{answer}\n" for answer in answers(chat_model, ["Hi", "안녕", "More"]))
    for ending in ("\n\nnot asked\n", "\n", ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"Hi\n안녕\nMore{ending}"))
        assert main(["chat", *words]) == 0
        assert capsys.readouterr().out == expected


def test_the_answer_streams(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written in pieces, each flushed as it is made."""

    shown: list[str] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["chat", "Hi", *words]) == 0
    assert len(set(shown)) > 3 and all(late.startswith(early) for early, late in itertools.pairwise(shown))


def test_json_a_turn(chat_model: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One object a line."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nMore\n"))
    assert main(["chat", "--json", *words]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [turn["text"] for turn in turns] == answers(chat_model, ["Hi", "More"])
    assert [(len(turn["token_ids"]), turn["finish_reason"]) for turn in turns] == [(6, "length")] * 2


def test_a_turn_that_is_refused_leaves_the_conversation_as_it_was(
    chat_model: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, and the next question is answered as if the refused one had not been asked."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Hi\n{'x' * 200}\nMore\n"))
    assert main(["chat", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(f"{answer}\n" for answer in answers(chat_model, ["Hi", "More"]))
    assert "octavo: the prompt has " in printed.err and "max_model_len is 128" in printed.err


def test_errors_are_status_2(
    words: list[str], engine_words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single question that is refused, a model without template, input that is no text."""
    assert main(["chat", "x" * 200, *words]) == 2
    assert "octavo: the prompt has 218 tokens, max_model_len is 128" in capsys.readouterr().err
    assert main(["chat", "Hi", *engine_words, "--model", str(tiny("llama_gqa"))]) == 2
    assert "octavo: this model has no chat template" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", *words]) == 2
    assert "octavo: standard input cannot be read: 'utf-8' codec" in capsys.readouterr().err

"""`octavo generate`: where prompts come from, and what is printed where."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from octavo.cli import build_parser, main
from octavo.cli.sampling import sampling_params_from
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.sampling_params import SamplingParams
from octavo.core.text.tokenizer import Tokenizer
from octavo.llm import LLM


@pytest.fixture(scope="module")
def texts(chat_model: Path) -> dict[str, str]:
    """What the model makes of some prompts, greedily, 8 tokens each."""
    prompts = ["Hello", "안녕", "two\nlines", "a\u2028b"]
    with LLM(chat_model, device="cpu", dtype="float32", max_model_len=128, num_kv_slots=256) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


@pytest.fixture
def words(engine_words: list[str]) -> list[str]:
    return [*engine_words, "--max-tokens", "8"]


def test_prompts_as_arguments(words: list[str], texts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its continuation on standard output; what the engine says of itself goes to standard error."""
    assert main(["generate", "Hello", "안녕", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"Hello{texts['Hello']}\n안녕{texts['안녕']}\n"
    lines = printed.err.splitlines()
    assert lines[0].startswith("model ") and lines[-1] == "Maximum concurrency for 128 tokens per request: 2.00x"
    assert sum(line.startswith("model ") for line in lines) == 1


def test_prompts_from_a_file(words: list[str], texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One a line, empty lines left out; only a line feed ends a line. Arguments come first."""
    (tmp_path / "prompts.txt").write_text("안녕\r\n\na\u2028b\n", encoding="utf-8", newline="")
    assert main(["generate", "Hello", "--file", str(tmp_path / "prompts.txt"), *words]) == 0
    expected = [f"{prompt}{texts[prompt]}\n" for prompt in ("Hello", "안녕", "a\u2028b")]
    assert capsys.readouterr().out == "".join(expected)


@pytest.mark.parametrize("piped", ["two\nlines", "two\nlines\n"])
def test_the_prompt_from_standard_input(
    words: list[str], texts: dict[str, str], piped: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is one prompt, less the newline that `echo` adds."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    assert main(["generate", *words]) == 0
    assert capsys.readouterr().out == f"two\nlines{texts[chr(10).join(('two', 'lines'))]}\n"


def test_json_lines(words: list[str], texts: dict[str, str], chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object a line, with ids, text and reasons; nothing else on standard output."""
    assert main(["generate", "Hello", "two\nlines", "--json", *words, "--stop", "~"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tokenizer = Tokenizer.from_folder(chat_model)
    assert [answer["prompt"] for answer in answers] == ["Hello", "two\nlines"]
    for answer in answers:
        (output,) = answer["outputs"]
        assert answer["prompt_token_ids"] == tokenizer.encode(answer["prompt"])
        assert output["text"] == tokenizer.decode(output["token_ids"]) == texts[answer["prompt"]]
        assert (output["index"], output["finish_reason"], output["stop_reason"], len(output["token_ids"])) == (0, "length", None, 8)
        assert (answer["num_cached_tokens"], answer["num_preemptions"]) == (0, 0)


def test_sampling_flags_arrive(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Hot with a seed twice the same, with another seed different; `--stop` ends the text, `--max-tokens` the last one counts."""

    def made(*flags: str) -> str:
        assert main(["generate", "Hello", *words, *flags]) == 0
        return capsys.readouterr().out

    hot = ["--temperature", "4", "--top-p", "0.99", "--top-k", "300", "--min-p", "0.0001"]
    assert made(*hot, "--seed", "1") == made(*hot, "--seed", "1") != made(*hot, "--seed", "2")
    whole = made()
    stop = whole[len("Hello") + 4 : len("Hello") + 6]
    assert made("--stop", stop) == whole[: whole.index(stop, len("Hello"))] + "\n"
    assert whole.startswith(made("--max-tokens", "2")[:-1].rstrip("\ufffd"))


def test_several_outputs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--n`: one after another, or in one JSON object; greedy ones would be all alike and are refused."""
    asked = ["generate", *words, "Hello", "--n", "3"]
    assert main([*asked, "--temperature", "2", "--seed", "1", "--json"]) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [one["index"] for one in outputs] == [0, 1, 2] and len({one["text"] for one in outputs}) == 3
    assert main([*asked, "--temperature", "2", "--seed", "1"]) == 0
    assert capsys.readouterr().out == "".join(f"Hello{one['text']}\n" for one in outputs)
    assert main(asked) == 2
    assert "n = 3 with temperature = 0.0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_flags_are_the_params_of_the_same_name(command: str) -> None:
    """Each arrives; without any: greedy, and one output."""
    given = {"presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25, "timeout_s": 2.5, "top_k": 7, "min_tokens": 3}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert sampling_params_from(build_parser(command).parse_args([command, "Hello", *flags])) == SamplingParams(
        temperature=0, max_tokens=64 if command == "generate" else None, **given
    )


def test_speculation_says_its_rate(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With drafts the text is the same, and a line on standard error counts them."""
    asked = ["generate", *words, "Hello " * 8, "--max-tokens", "16"]
    assert main(asked) == 0
    plain = capsys.readouterr()
    assert main([*asked, "--set", "engine.speculative_config={prompt_lookup_min=1}"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert re.search(r"speculation: \d+ of [1-9]\d* drafts accepted \(\d+%\) in \d+ steps", drafted.err)
    assert "drafts" not in plain.err


def test_short_forms_and_sets(engine_words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--scheduler static` is `--set scheduler.plugin=static`, and `--set` wins."""
    assert (
        main(
            ["generate", "Hello", *engine_words, "--scheduler", "static", "--allocator", "paged", "--kernel", "naive", "--max-tokens", "1"]
        )
        == 0
    )
    assert "stack: static + paged + naive + " in capsys.readouterr().err
    assert main(["generate", "Hello", *engine_words, "--scheduler", "static", "--set", "scheduler=continuous", "--max-tokens", "1"]) == 0
    assert "stack: continuous + " in capsys.readouterr().err


def test_a_models_name_is_a_name(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where TOML would read a number."""
    (tmp_path / "2024").symlink_to(chat_model)
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "Hello", "--model", "2024", "--set", "engine.max_model_len=64", "--max-tokens", "1"]) == 0
    assert "model 2024: local folder 2024" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "max_tokens = 0: must be a whole number, 1 or above, or None"),
        (["--temperature", "-1"], "temperature = -1.0: must be a number from 0 to 1,000,000"),
        (["--temperature", "nan"], "temperature = nan: must be a number from 0 to 1,000,000"),
        (["--max-tokens", "500"], "5 prompt tokens + max_tokens 500 = 505 exceed max_model_len 128: ask for at most 123"),
        (["--set", "engine.num_kv_slots=16"], "the KV pool (num_kv_slots) has 16 slots of 512 bytes and cannot hold one request"),
        (["--set", "scheduler"], "--set scheduler: write --set SECTION.NAME=VALUE"),
        (["--file", "nowhere.txt"], "--file nowhere.txt cannot be read: [Errno 2]"),
        (["--json-schema", "nowhere.json"], "--json-schema 'nowhere.json' is neither a schema, which begins with {, nor a file"),
        (["--json-schema", '{"uniqueItems": true}'], 'Unimplemented keys: ["uniqueItems"]'),
        (["--regex", "(a"], "structured_outputs: regex cannot be compiled: invalid regex"),
        (["--set", "engine.device=nonsense"], "engine.device = 'nonsense', but Octavo runs on 'cpu' and 'cuda'"),
    ],
)
def test_errors_are_status_2(engine_words: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One message on standard error, no traceback, nothing on standard output (fault 27)."""
    assert main(["generate", "Hello", *engine_words, *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("octavo: ") or "octavo: " in printed.err
    assert message in printed.err


def test_input_that_is_no_text(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that aren't UTF-8, an empty file, and empty input."""
    assert main(["generate", "Hello", "", *words]) == 2
    assert "octavo: the prompt is empty: give text as an argument, with --file, or on standard input" in capsys.readouterr().err
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert main(["generate", "--file", str(tmp_path / "bytes"), *words]) == 2
    assert "cannot be read: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err
    (tmp_path / "empty").write_text("\n")
    assert main(["generate", "--file", str(tmp_path / "empty"), *words]) == 2
    assert "octavo: the prompt is empty" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["generate", *words]) == 2
    assert "octavo: standard input cannot be read: 'utf-8' codec" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["generate", *words]) == 2
    assert "octavo: the prompt is empty" in capsys.readouterr().err


def test_structured_output(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schema as text or in a file, or an expression: the answer follows it."""
    schema = '{"enum": ["a", 12, null]}'
    (tmp_path / "schema.json").write_text(schema)
    for flags in (["--json-schema", schema], ["--json-schema", str(tmp_path / "schema.json")], ["--regex", '"a"|12|null']):
        assert main(["generate", "Hello", *flags, *words]) == 0
        assert json.loads(capsys.readouterr().out.removeprefix("Hello")) in ("a", 12, None)


def test_beam_search(words: list[str], chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--beam-width` prints the best continuation, with `--json` all of them with their scores; the penalty arrives."""
    with LLM(chat_model, device="cpu", dtype="float32", max_model_len=128, num_kv_slots=256) as llm:
        (expected,) = llm.beam_search("Hello", BeamSearchParams(3, 8, length_penalty=0.0), use_tqdm=False)
    assert main(["generate", "Hello", *words, "--beam-width", "3"]) == 0
    assert capsys.readouterr().out == f"Hello{expected.outputs[0].text}\n"
    assert main(["generate", "Hello", "--json", *words, "--beam-width", "3", "--length-penalty", "0"]) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["token_ids"] for output in outputs] == [output.token_ids for output in expected.outputs]
    assert [output["score"] for output in outputs] == [output["cumulative_logprob"] for output in outputs]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--beam-width", "17"], "beam_width = 17: must be a whole number from 1 to 16"),
        (["--beam-width", "2", "--temperature", "0.5"], "beam search draws nothing: --temperature does not go with --beam-width"),
        (["--beam-width", "2", "--stop", "x"], "beam search draws nothing: --stop does not go with --beam-width"),
        (["--length-penalty", "2"], "--length-penalty is of beam search: give --beam-width too"),
    ],
)
def test_beam_flags_that_do_not_fit(words: list[str], flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before a model is loaded."""
    assert main(["generate", "Hello", *words, *flags]) == 2
    assert complaint in capsys.readouterr().err

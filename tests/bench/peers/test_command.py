"""The command, with a tiny model: Octavo and Hugging Face in processes of their own, and clear words for what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.peers import __main__ as command
from octavo.bench.peers.__main__ import main
from octavo.bench.peers.claims import HUGGING_FACE, INT8, LLAMA_CPP, OCTAVO, VLLM
from octavo.bench.peers.contenders import Files, contenders, find_files
from octavo.bench.peers.outcome import Outcome
from octavo.bench.startup import FIRST_TOKEN, Start
from octavo.core.errors import ConfigError
from octavo.core.native import absence, load
from octavo.core.settings.config import load_config
from octavo.core.settings.layers import from_command_line
from octavo.core.threads import allowed_cpus
from tests.matrix.stacks import REGISTRY
from tests.models import tiny


@pytest.mark.slow
def test_a_page_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of what is installed here have figures, the others a reason; the answers are the same."""
    out = tmp_path / "page.md"
    words = ["--model", str(tiny("llama_gqa")), "--scale", "0.05", "--rounds", "2", "--threads", "1", "--out", str(out)]
    status = main([*words, "--rows", "static", "mixed", "memory", "--logs", str(tmp_path / "logs")])
    said = capsys.readouterr().err
    assert status == 0, said
    text, kept = out.read_text(), json.loads(out.with_suffix(".json").read_text())
    assert "About 1 minute on two cores" in said and "vLLM takes no part: no environment was given" in said and f"written: {out}" in said
    assert "Tried out at scale 0.05" in text and "not available: no environment was given: --vllm PATH" in text
    assert len(kept["seconds"]["mixed"]["Octavo"]) == len(kept["seconds"]["mixed"]["Hugging Face"]) == 2
    assert kept["alike"]["mixed"]["Hugging Face"][0] >= 0.5  # in bf16
    assert kept["memory"]["Octavo"]["kv"] > 0 and kept["facts"]["Octavo"]["threads"] == 1
    assert kept["facts"]["Octavo"]["native level"] == ("none" if absence() else load().level)
    assert "Left, by what the turns took so far: about 1 minute" in said
    assert (tmp_path / "logs" / "Octavo.log").is_file()


def test_what_is_wrong_is_said_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is no environment, one without the package, a model that is not there, numbers out of range."""
    model = ["--model", str(tiny("llama_gqa")), "--scale", "0.05"]
    assert main([*model, "--vllm", str(tmp_path)]) == 2
    assert f"{tmp_path} is no virtual environment: there is no {tmp_path}/bin/python" in capsys.readouterr().err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert main([*model, "--llama-cpp", str(tmp_path)]) == 2
    assert f"{tmp_path} has no llama_cpp" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "nowhere")]) == 2
    assert "there is no file or folder" in capsys.readouterr().err
    for wrong in (["--rounds", "0"], ["--scale", "1.5"], ["--rows", "nine"]):
        with pytest.raises(SystemExit):
            main([*model, *wrong])


def test_settings_are_alike(tmp_path: Path) -> None:
    """Length, pool and threads of all; llama.cpp needs the GGUF file."""
    python, packages = tmp_path / "bin" / "python", tmp_path / "lib" / "python3.11" / "site-packages"
    python.parent.mkdir()
    python.touch()
    for package in ("vllm", "llama_cpp"):
        (packages / package).mkdir(parents=True)
    files = Files(folder=tmp_path, gguf=tmp_path / "m.gguf", weight_bytes=1, vocab_size=384, context=8192, origin="")
    found = contenders(files, longest=4001, threads=2, vllm=tmp_path, llama_cpp=tmp_path)
    parts = {name: part for name, part in found.items() if not isinstance(part, str)}
    assert len(parts) == 6 and {part.environ["OMP_NUM_THREADS"] for part in parts.values()} == {"2"}
    assert parts["Octavo"].options == {"dtype": "bfloat16", "max_model_len": 4096, "kv_cache_memory": "4GiB", "num_threads": 2}
    assert parts[INT8].options["model_plugin"] == {"plugin": "llama", "quantization": "int8"}
    assert parts[INT8].options["kv_cache_memory"] == "1GiB"
    assert parts[VLLM].options["max_model_len"] == parts[LLAMA_CPP].options["n_ctx"] == 4096
    assert parts[VLLM].environ["VLLM_CPU_KVCACHE_SPACE"] == "4" and parts[VLLM].warmups == 2
    assert parts[VLLM].options["enable_prefix_caching"] is True
    assert parts[VLLM].environ["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(allowed_cpus())[:2]))
    assert parts[HUGGING_FACE].run_wait_s == 3600 and parts[HUGGING_FACE].warmups == 0 and parts[VLLM].run_wait_s == 600
    assert parts[LLAMA_CPP].model == files.gguf and parts[HUGGING_FACE].model == tmp_path
    without = contenders(
        Files(folder=tmp_path, gguf=None, weight_bytes=1, vocab_size=384, context=512, origin=""),
        longest=4001, threads=2, vllm=None, llama_cpp=tmp_path,
    )  # fmt: skip
    assert without[LLAMA_CPP] == "the model is no GGUF file" and without[VLLM] == "no environment was given: --vllm PATH"
    with pytest.raises(ConfigError):
        contenders(files, longest=1, threads=2, vllm=tmp_path / "nowhere", llama_cpp=None)


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines run in folders of their own."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").touch()
    (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "vllm").mkdir(parents=True)
    (tmp_path / "model").symlink_to(tiny("llama_gqa"))
    monkeypatch.chdir(tmp_path)
    files = find_files(Path("model"), report=print)
    assert files.folder.is_absolute()
    found = contenders(files, longest=1, threads=1, vllm=Path("venv"), llama_cpp=None)[VLLM]
    assert not isinstance(found, str) and found.python == tmp_path / "venv" / "bin" / "python"  # the link: it is the environment's


def test_the_command_starts_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the type, length, pool and threads that it is measured with beside others; the first start is not counted."""
    starts: list[tuple[list[str], dict[str, str]]] = []

    def start_once(words: list[str], *, timeout_s: float, environ: dict[str, str]) -> Start:
        starts.append((words, environ))
        return Start(stages={FIRST_TOKEN: float(len(starts))})

    monkeypatch.setattr(command, "start_once", start_once)
    monkeypatch.setenv("OCTAVO_SET_ENGINE__DTYPE", "float16")
    files = Files(folder=Path("/m"), gguf=None, weight_bytes=1, vocab_size=384, context=8192, origin="")
    octavo = contenders(files, longest=4001, threads=2, vllm=None, llama_cpp=None)[OCTAVO]
    assert not isinstance(octavo, str)
    outcome = Outcome(settings={"rows": ["start"], "rounds": 2, "threads": 2, "seed": 0, "scale": 1}, identity={})
    command._start(outcome, octavo, rounds=2)
    assert outcome.starts == {OCTAVO: [2.0, 3.0]} and len(starts) == 3
    words, environ = starts[0]
    assert words[:2] == ["--model", "/m"] and set(words[2::2]) == {"--set"}
    assert environ["OMP_NUM_THREADS"] == "2" and "OCTAVO_SET_ENGINE__DTYPE" not in environ
    engine = load_config(REGISTRY, environ=environ, overrides=from_command_line(words[3::2])).engine
    assert (engine.dtype, engine.max_model_len, engine.kv_cache_memory, engine.num_threads) == ("bfloat16", 4096, 4 << 30, 2)

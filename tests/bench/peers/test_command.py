"""The command, with a tiny model: Octavo and Hugging Face in processes of their own, and clear words for what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.peers.__main__ import main
from octavo.bench.peers.claims import HUGGING_FACE, INT8, LLAMA_CPP, VLLM
from octavo.bench.peers.contenders import Files, contenders
from octavo.core.errors import ConfigError
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
    assert parts[LLAMA_CPP].model == files.gguf and parts[HUGGING_FACE].model == tmp_path
    without = contenders(
        Files(folder=tmp_path, gguf=None, weight_bytes=1, vocab_size=384, context=512, origin=""),
        longest=4001, threads=2, vllm=None, llama_cpp=tmp_path,
    )  # fmt: skip
    assert without[LLAMA_CPP] == "the model is no GGUF file" and without[VLLM] == "no environment was given: --vllm PATH"
    with pytest.raises(ConfigError):
        contenders(files, longest=1, threads=2, vllm=tmp_path / "nowhere", llama_cpp=None)

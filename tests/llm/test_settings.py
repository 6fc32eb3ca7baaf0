"""Settings of `LLM`: the calls people know, what is refused, the log at start, and one meaning for all ways to say a thing."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.settings import add_config_arguments, config_from
from octavo.core.assembly import build_engine, load_model
from octavo.core.errors import ConfigError, IncompatibleStackError, InvalidOptionsError, ModelSourceError, UnknownPluginError
from octavo.core.outputs import StepReport
from octavo.core.registry import Registry
from tests.models import tiny

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CPU = {"device": "cpu", "dtype": "float32"}
SLOT_BYTES = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head size, fp32


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that can't be had without an account, and a tiny one in a folder of that name."""
    shutil.copytree(tiny("llama_gqa", max_position_embeddings=8192), tmp_path / LLAMA)
    monkeypatch.chdir(tmp_path)
    return LLAMA


# ------------------------------------------------------------------------------------------- literal calls


def test_the_articles_call(stand_in: str) -> None:
    """Word for word: each setting arrives, and the prompt is answered."""
    llm = LLM(
        model="meta-llama/Llama-3.1-8B-Instruct",
        gpu_memory_utilization=0.92,
        max_model_len=8192,
        max_num_batched_tokens=16384,
        max_num_seqs=256,
        block_size=16,
    )
    with llm:
        outputs = llm.generate(["프롬프트를 여기에"], SamplingParams(temperature=0.7, max_tokens=256))
        built = llm.built
    assert (outputs[0].prompt, len(outputs[0].outputs[0].token_ids)) == ("프롬프트를 여기에", 256)
    assert outputs[0].outputs[0].text == built.loaded.tokenizer.decode(outputs[0].outputs[0].token_ids)
    options = built.config.scheduler_options
    assert (options.max_num_seqs, options.max_num_batched_tokens, built.config.max_model_len) == (256, 16384, 8192)
    assert (built.config.engine.gpu_memory_utilization, built.pool.block_size) == (0.92, 16)


def test_the_articles_call_with_chunked_prefill(stand_in: str) -> None:
    """It chooses the scheduler that cuts prompts, and a prompt longer than its budget is answered over two steps."""
    steps = Chunks()
    with LLM(model=stand_in, enable_chunked_prefill=True, max_num_batched_tokens=4096, gpu_memory_utilization=0.90) as llm:
        llm.engine.observers.add(steps)
        (output,) = llm.generate("x" * 5000, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        names, options, engine = llm.built.config.stack.names, llm.built.config.scheduler_options, llm.built.config.engine
    assert (names["scheduler"], options.max_num_batched_tokens, engine.gpu_memory_utilization) == ("chunked", 4096, 0.90)
    assert steps.tokens == [4096, 904, 1, 1] and len(output.outputs[0].token_ids) == 3


class Chunks:
    """Tokens of each step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def octavo_step_finished(self, report: StepReport) -> None:
        self.tokens.append(report.num_tokens)


def test_switches_choose_plugins(stand_in: str) -> None:
    """Each is short for one, and for its counterpart where it is off."""
    for switches, expected in (
        ({"enable_prefix_caching": True, "enable_chunked_prefill": False}, ("continuous", "prefix")),
        ({"enable_prefix_caching": False, "enable_chunked_prefill": True}, ("chunked", "paged")),
    ):
        with LLM(model=stand_in, max_model_len=64, num_kv_slots=64, **CPU, **switches) as llm:
            names = llm.built.config.stack.names
            assert (names["scheduler"], names["allocator"]) == expected


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"swap_space": -1}, InvalidOptionsError, "engine.swap_space: Input should be greater than or equal to 0"),
        ({"swap_space": 1e6, "max_model_len": 64}, ConfigError, "swap_space = 1e+06 GiB is more than the host's"),
        ({"kv_dtype": "fp8"}, InvalidOptionsError, "engine.kv_dtype: a KV cache in fp8 is not available yet; use 'auto'"),
        ({"enable_chunked_prefill": True, "scheduler": "static"}, InvalidOptionsError, 'contradicts scheduler = "static"'),
        ({"max_num_seq": 8}, InvalidOptionsError, "max_num_seq: no such setting (did you mean max_num_seqs?)"),
        ({"scheduler": "statik"}, UnknownPluginError, "no scheduler plugin 'statik' is installed (did you mean static?)"),
        (
            {"block_size": 0, "allocator": "paged"},
            InvalidOptionsError,
            "allocator.paged.block_size: Input should be greater than or equal to 1",
        ),
        ({"allocator": "contiguous", "block_size": 16}, InvalidOptionsError, "it is an option of allocator 'paged'"),
        ({"model_plugin": "mamba"}, UnknownPluginError, "no model plugin 'mamba' is installed"),
        ({"max_model_len": 10_000}, InvalidOptionsError, "10000 is more than the 8192 positions of the model; set at most 8192"),
        ({"num_kv_slots": 64, "kv_cache_memory": "4MiB"}, InvalidOptionsError, "kv_cache_memory and num_kv_slots both size the KV pool"),
        ({"num_kv_slots": 64}, ConfigError, "(num_kv_slots) has 64 slots of 512 bytes and cannot hold one request of max_model_len 8192"),
        ({"kv_cache_memory": "1MiB"}, ConfigError, "(kv_cache_memory) has 2048 slots of 512 bytes and cannot hold one request"),
        ({"max_num_batched_tokens": 4096, "scheduler": "continuous"}, InvalidOptionsError, "4096 is less than max_model_len = 8192"),
        ({"device": "nonsense"}, ConfigError, "engine.device = 'nonsense', but Octavo runs on 'cpu' and 'cuda'"),
        ({"model": 5}, InvalidOptionsError, "model.source: must name a model, a folder or a file (got 5)"),
    ],
)
def test_settings_that_cannot_be_used(stand_in: str, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each is refused before anything runs, with a message that names it."""
    with pytest.raises(error) as raised:
        LLM(**{"model": stand_in, **CPU, **settings})
    assert message in str(raised.value)


def test_a_model_that_cannot_be_had_names_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gated, missing or misspelt: the message says which model needs no account. The hub is switched off here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    for model in (LLAMA, str(tmp_path / "nowhere"), "smollm2"):
        with pytest.raises(ModelSourceError, match="smollm2-135m"):
            LLM(model=model)


def test_a_model_of_an_unknown_architecture(tmp_path: Path) -> None:
    """Whoever was asked says why not."""
    shutil.copytree(tiny("llama_gqa"), tmp_path / "odd")
    config = (tmp_path / "odd/config.json").read_text()
    (tmp_path / "odd/config.json").write_text(config.replace("LlamaForCausalLM", "OddForCausalLM").replace('"llama"', '"odd"'))
    with pytest.raises(ModelSourceError, match=r"model plugin 'transformers' cannot run this model: transformers .* model_type 'odd'"):
        LLM(model=tmp_path / "odd", **CPU)
    with pytest.raises(IncompatibleStackError, match="model 'llama' does not accept this model: architecture 'OddForCausalLM'"):
        LLM(model=tmp_path / "odd", model_plugin="llama", **CPU)


# ------------------------------------------------------------------------------------------- pool and log


def test_num_kv_slots_is_exact(new_llm: Callable[..., LLM]) -> None:
    """As many slots, not one more, in either layout; `kv_cache_memory` takes a size in words."""
    assert new_llm(num_kv_slots=130, block_size=1).engine.kv.capacity == 130
    contiguous = new_llm(allocator="contiguous", block_size=None, num_kv_slots=130)
    assert contiguous.engine.kv.capacity == 130
    llm = new_llm(num_kv_slots=None, kv_cache_memory="4MiB")
    assert (llm.built.pool.slot_bytes, llm.engine.kv.capacity) == (SLOT_BYTES, 4 * 2**20 // SLOT_BYTES)
    assert llm.engine.runner.tensors.device[0][0].shape[0] == llm.engine.kv.capacity


def test_unset_the_pool_holds_what_the_limits_ask_for(new_llm: Callable[..., LLM]) -> None:
    """On a CPU with RAM enough: max_num_seqs requests of max_model_len (S4)."""
    assert new_llm(num_kv_slots=None).engine.kv.capacity == 8 * 128


def test_the_log_at_start(new_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    """The model once, its weights, the stack, the pool in blocks, and the concurrency (M9)."""
    with caplog.at_level(logging.INFO, logger="octavo"):
        new_llm(scheduler="continuous", allocator="paged", kernel="sdpa", ops="torch", num_kv_slots=341)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("model ")] == [f"model {folder}: local folder {folder} (weights fp32)"]
    assert lines[-5:] == [
        "stack: continuous + paged + sdpa + torch + llama",
        "gpu_memory_utilization is unused on a CPU",
        f"KV pool: 0.00 GiB, 340 slots of {SLOT_BYTES} bytes (num_kv_slots)",
        "# KV blocks: 85",
        "Maximum concurrency for 128 tokens per request: 2.66x",
    ]
    assert any(line.startswith("weights: 0.00 GiB in float32 on cpu, ") for line in lines)
    with caplog.at_level(logging.INFO, logger="octavo"):
        new_llm(allocator="contiguous", block_size=None, num_kv_slots=341)
    assert "# KV slots: 341" in caplog.messages


# ------------------------------------------------------------------------------------------- one meaning


def test_file_environment_command_line_and_python_say_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ways to one resolved configuration."""
    file = tmp_path / "octavo.toml"
    file.write_text(
        f'[model]\nsource = "{folder}"\nplugin = "llama"\n[scheduler]\nplugin = "static"\nmax_num_seqs = 3\n'
        '[allocator]\nplugin = "paged"\nblock_size = 8\n[kernel]\nplugin = "naive"\n[ops]\nplugin = "torch"\n'
        '[engine]\nmax_model_len = 64\nnum_kv_slots = 192\ndtype = "float32"\ndevice = "cpu"\n'
    )
    with LLM(config=file) as llm:
        expected = llm.built.config
    assert str(expected.stack) == "static + paged + naive + torch + llama"
    assert (expected.scheduler_options.max_num_seqs, expected.max_model_len, expected.engine.num_kv_slots) == (3, 64, 192)

    flat: dict[str, Any] = {"max_num_seqs": 3, "block_size": 8, "max_model_len": 64, "num_kv_slots": 192, **CPU}
    with LLM(folder, model_plugin="llama", scheduler="static", allocator="paged", kernel="naive", ops="torch", **flat) as llm:
        assert llm.built.config == expected
    tables: dict[str, Any] = {"scheduler": {"plugin": "static", "max_num_seqs": 3}, "allocator": {"plugin": "paged", "block_size": 8}}
    with LLM(folder, model_plugin="llama", kernel="naive", **tables, ops="torch", max_model_len=64, num_kv_slots=192, **CPU) as llm:
        assert llm.built.config == expected

    sections = {
        "model": {"source": folder, "plugin": "llama"},
        "scheduler": {"plugin": "static", "max_num_seqs": 3},
        "allocator": {"plugin": "paged", "block_size": 8},
        "kernel": {"plugin": "naive"},
        "ops": {"plugin": "torch"},
        "engine": {"max_model_len": 64, "num_kv_slots": 192, **CPU},
    }
    pairs = [(section, name, value) for section, table in sections.items() for name, value in table.items()]
    words = [word for section, name, value in pairs for word in ("--set", f"{section}.{name}={value}")]
    assert _resolved(words) == expected
    with monkeypatch.context() as patch:
        for section, name, value in pairs:
            patch.setenv(f"OCTAVO_SET_{section}__{name}".upper(), str(value))
        with LLM() as llm:
            assert llm.built.config == expected
    assert _resolved(["--config", str(file)]) == expected
    assert _resolved(["--config", str(file), "--set", "scheduler.max_num_seqs=2"]) != expected


def _resolved(words: list[str]) -> Any:
    """As `octavo generate` and `chat` understand these words."""
    parser, registry = argparse.ArgumentParser(), Registry.discover()
    add_config_arguments(parser)
    config = config_from(parser.parse_args(words), registry)
    return build_engine(registry, config, load_model(registry, config)).config


def test_python_overrides_the_file(folder: Path, tmp_path: Path) -> None:
    """A keyword wins over the file, what it leaves open is the file's."""
    file = tmp_path / "octavo.toml"
    file.write_text('[scheduler]\nmax_num_seqs = 3\norder = "priority"\n[engine]\nmax_model_len = 64\nnum_kv_slots = 192\n')
    with LLM(folder, config=str(file), max_num_seqs=5, **CPU) as llm:
        options = llm.built.config.scheduler_options
        assert (options.max_num_seqs, options.order, llm.built.pool.num_slots) == (5, "priority", 192)
    with pytest.raises(InvalidOptionsError, match=r"config file .*nowhere\.toml cannot be read"):
        LLM(folder, config=tmp_path / "nowhere.toml")

"""Config, plugins and model files become an engine: what is built, what is told, what is refused before anything large is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.assembly import BuiltEngine, LoadedModel, build_engine, load_model
from octavo.core.clock import ManualClock
from octavo.core.descriptors import KINDS
from octavo.core.errors import ConfigError, IncompatibleStackError, ModelSourceError, PluginContractError
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.testing.fake_plugins import fake_kernel, write_package
from tests.models import tiny

REGISTRY = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})


def config(**engine: Any) -> EngineConfig:
    sections = {"engine": {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_slots": 128, **engine}}
    return load_config(REGISTRY, environ={}, overrides={"model": {"source": str(tiny("llama_gqa"))}, **sections})


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """The tiny model on the CPU."""
    return load_model(REGISTRY, config())


def run(built: BuiltEngine) -> list[int]:
    """The tokens of one greedy request."""
    built.engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    while True:
        for output in built.engine.step():
            return output.outputs[0].token_ids


def test_unwritten_kv_is_nan_under_debug_only(loaded: LoadedModel) -> None:
    """Whoever reads a slot that nobody wrote shows it; without debug the pool is zeros, which take no memory until touched."""
    for debug in (True, False):
        built = build_engine(REGISTRY, config(debug=debug), loaded)
        tensors = [tensor for layer in built.engine.runner.tensors.device for tensor in layer]
        assert len(tensors) == 4 and {tensor.shape for tensor in tensors} == {(128, 2, 16)}
        for tensor in tensors:
            assert bool(tensor.isnan().all()) == debug and bool((tensor == 0).all()) != debug
        assert built.engine.debug == debug
        run(built)
        assert int((~tensors[0].isnan() & (tensors[0] != 0)).any(dim=-1).any(dim=-1).sum()) == 6  # 3 + 4 tokens, the last one's unwritten


def test_a_pool_too_small_for_one_request(loaded: LoadedModel) -> None:
    """Both numbers, and what to do."""
    with pytest.raises(ConfigError) as error:
        build_engine(REGISTRY, config(num_kv_slots=63), loaded)
    assert str(error.value) == (
        "the KV pool (num_kv_slots) has 63 slots of 512 bytes and cannot hold one request of max_model_len 64: "
        "lower max_model_len, or give it more (0.00 GiB are needed)"
    )


def test_several_engines_share_one_model(loaded: LoadedModel) -> None:
    """Same weights, pools apart: one's end is nothing to the other."""
    first, second = build_engine(REGISTRY, config(), loaded), build_engine(REGISTRY, config(num_kv_slots=64), loaded)
    assert first.engine.runner.model is second.engine.runner.model
    assert (first.engine.kv.capacity, second.engine.kv.capacity) == (128, 64)
    first.engine.close()
    assert len(run(second)) == 4


def test_the_engine_takes_the_clock(loaded: LoadedModel) -> None:
    """Times of requests are on it."""
    clock = ManualClock(100.0)
    built = build_engine(REGISTRY, config(), loaded, clock=clock)
    request = built.engine.add_request([1], SamplingParams(max_tokens=1))
    assert request.arrival == 100.0


def test_the_model_is_named_once(loaded: LoadedModel) -> None:
    """Where it comes from is said when it is found, and not where the caller found it."""
    lines: list[str] = []
    load_model(REGISTRY, config(), report=lines.append)
    assert [line.partition(" ")[0] for line in lines] == ["model", "weights:"]
    lines.clear()
    load_model(REGISTRY, config(), source=loaded.source, report=lines.append)
    assert [line.partition(" ")[0] for line in lines] == ["weights:"]


@pytest.mark.parametrize("fault", ["stack", "tokenizer", "device", "length"])
def test_nothing_is_loaded_for_a_stack_that_cannot_run(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be known before gigabytes are read is checked before."""
    registry = Registry()
    for kind in KINDS:
        for plugin in REGISTRY.descriptors(kind):
            registry.add(plugin)
    registry.add(fake_kernel("gpu_only", needs=lambda options, facts: {"device:cuda"}))
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama_gqa"), folder)
    sections: dict[str, Any] = {"model": {"source": str(folder)}, "engine": {"device": "cpu"}}
    if fault == "stack":
        sections["kernel"] = "gpu_only"
        error, message = IncompatibleStackError, "kernel 'gpu_only' needs device:cuda, but device is cpu"
    elif fault == "tokenizer":
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "none such"}}))
        error, message = ModelSourceError, "can't be read as a tokenizer"
    elif fault == "device":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        sections["engine"]["device"] = "cuda"
        error, message = ConfigError, "torch finds no CUDA device here"
    else:
        sections["engine"]["max_model_len"] = 513
        error, message = ConfigError, "513 is more than the 512 positions of the model"
    monkeypatch.setattr("octavo.plugins.models.llama.model.load", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    with pytest.raises(error) as raised:
        load_model(registry, load_config(registry, environ={}, overrides=sections))
    assert message in str(raised.value)


OBSERVER = """
from octavo.core.hookspecs import hookimpl

told = []

@hookimpl
def octavo_engine_started(stack): told.append(("started", str(stack)))
@hookimpl
def octavo_step_finished(report): told.append(("step", report.num_rows))
@hookimpl
def octavo_request_finished(output): told.append(("request", len(output.outputs[0].token_ids)))
"""
BROKEN = """
from octavo.core.hookspecs import hookimpl

@hookimpl
def octavo_step_finished(report): raise ValueError("counters can only go up")
"""


def test_installed_observers_are_told(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A package with observer hooks hears of start, steps and ends; one that raises is logged and dropped (fault 22)."""
    write_package(tmp_path, "octavo-listener", octavo_listener=OBSERVER)
    write_package(tmp_path, "octavo-a-broken-one", octavo_broken=BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry.discover(environ={})
    assert len(registry.observers) == 2
    built = build_engine(registry, config(), loaded)
    assert len(run(built)) == 4
    assert sys.modules["octavo_listener"].told == [("started", str(built.config.stack)), *[("step", 1)] * 3, ("request", 4), ("step", 1)]
    assert caplog.text.count("failed in step_finished and is dropped") == 1


def test_auto_without_the_native_library_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In one warning, with the reason: a CPU without it is several times slower."""
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", "/none.so")
    build_engine(REGISTRY, config(), load_model(REGISTRY, config()))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(" needs ")[0] for text in told] == [
        "auto goes without kernel 'cpu_paged' (it takes 'sdpa') and ops 'cpu' (it takes 'torch'):"
    ]


def test_observers_can_be_switched_off(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment, like every plugin."""
    write_package(tmp_path, "octavo-silent", octavo_silent=OBSERVER)
    monkeypatch.syspath_prepend(tmp_path)
    run(build_engine(Registry.discover(environ={"OCTAVO_DISABLE_PLUGINS": "octavo_silent"}), config(), loaded))
    assert "octavo_silent" not in sys.modules


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_pool_of_a_gpu_leaves_room_for_weights_and_activations(caplog: pytest.LogCaptureFixture) -> None:
    """Its log counts GPU blocks; the pool and what is in use stay below the share (M8, M9)."""
    lines: list[str] = []
    on_gpu = load_config(
        REGISTRY,
        environ={},
        overrides={"model": {"source": str(tiny("llama_gqa"))}, "engine": {"device": "cuda", "gpu_memory_utilization": 0.5}},
    )
    built = build_engine(REGISTRY, on_gpu, load_model(REGISTRY, on_gpu), report=lines.append)
    assert any(line.startswith("# GPU blocks: ") for line in lines)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.5 * total + 2**30
    assert len(run(built)) == 4
    built.engine.close()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"rope_parameters": 5}'),
        ("config.json", '{"rms_norm_eps": "x"}'),
        ("tokenizer_config.json", '{"eos_token": {"a": 1}}'),
    ],
)
def test_a_models_file_of_the_wrong_shape_is_named(file: str, text: str, tmp_path: Path) -> None:
    """Valid JSON may hold anything: the error says which file cannot be used, without a traceback of ours."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama_gqa"), folder)
    old = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(old | json.loads(text)))
    registry = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    checked = load_config(registry, environ={}, overrides={"model": {"source": str(folder)}, "engine": {"device": "cpu"}})
    with pytest.raises((ModelSourceError, IncompatibleStackError), match=r"cannot be used|no built-in model plugin accepts"):
        load_model(registry, checked)


@pytest.mark.parametrize(
    ("build", "text"), [("None", "build returned None, which is no Kernel"), ("1 / 0", "could not be built: ZeroDivision")]
)
def test_a_plugin_that_builds_nothing_is_named(build: str, text: str, loaded: LoadedModel) -> None:
    """Its mistake is told as its own."""
    registry = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    plugin = replace(
        fake_kernel("odd", provides=frozenset({"paged_kv", "contiguous_kv"})),
        build=lambda options, layers, facts: eval(build),  # what a mistaken author might have written
    )
    registry.add(plugin)
    checked = load_config(
        registry, environ={}, overrides={"kernel": {"plugin": "odd"}, "engine": {"device": "cpu", "dtype": "float32", "num_kv_slots": 512}}
    )
    with pytest.raises(PluginContractError, match=f"kernel 'odd'.*{text}"):
        build_engine(registry, checked, loaded)

"""What is counted is exact, what is measured adds up, and a saving is said of pool and device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.bench import memory_table as module
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.table import markdown
from octavo.bench.memory_table import MemoryMeter, MemoryTable, _forget_peak, full_step, resident_peak
from octavo.bench.reports.run_report import run_report
from octavo.core.assembly import BuiltEngine
from octavo.core.settings.config import load_config
from octavo.core.stack import Stack
from octavo.core.torch_runner import TorchRunner
from tests.bench.ablation.made import AGAIN, OTHER, USAGE, twice_as_fast
from tests.bench.ablation.small import registry
from tests.bench.measured import timed
from tests.bench.test_identity import stack
from tests.bench.test_self_checks import STACKS
from tests.matrix.stacks import build
from tests.models import tiny

MIB = 1 << 20


@pytest.fixture(scope="module")
def built() -> BuiltEngine:
    return build(tiny("llama_gqa"), stack(), max_num_seqs=4, max_model_len=64, num_kv_slots=512)


def test_a_peak_is_of_what_came_since() -> None:
    """50 MiB that come and go are in the next peak and not in the one after it."""
    _forget_peak()
    before = resident_peak()
    block = np.ones(50 * MIB, dtype=np.int8)
    del block
    assert resident_peak() - before > 40 * MIB
    _forget_peak()
    assert resident_peak() - before < 40 * MIB


def test_the_table_of_a_run(built: BuiltEngine) -> None:
    """Weights and pool are counted; the peak is at least what the process needs to hold them."""
    meter = MemoryMeter(built.loaded.model)
    meter.begin(built)
    block = np.ones(60 * MIB, dtype=np.int8)
    del block
    table = meter.table(built.pool)
    assert table.weights == built.loaded.model.weight_bytes() and table.kv_cache == built.pool.num_bytes
    assert table.other > 50 * MIB and table.activations >= 0
    assert table.weights + table.other + 50 * MIB < table.peak < table.total
    assert 0 < table.free < table.total
    assert [name for name, _, _ in table.rows] == ["weights", "kv cache", "activations", "other", "free", "peak", "total"]
    assert table.rows[-1] == ("total", table.total, 1.0)


def test_activations_are_of_the_largest_step(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each size and kernel; the next run of another one has its own figure."""
    asked, peaks = [], iter([7 * MIB, 9 * MIB, 8 * MIB])
    monkeypatch.setattr(module, "run_step", lambda engine, lengths: asked.append((engine, lengths)))
    meter = MemoryMeter(built.loaded.model)
    monkeypatch.setattr(meter, "_used", lambda: 0)
    monkeypatch.setattr(meter, "_highest", lambda: next(peaks))
    shorter = build(tiny("llama_gqa"), stack(), max_num_seqs=4, max_model_len=48, num_kv_slots=512)
    naive = build(tiny("llama_gqa"), kernel("naive"), max_num_seqs=4, max_model_len=64, num_kv_slots=512)
    found = []
    for engine in (built, shorter, built, naive):
        meter.begin(engine)
        found.append(meter.activations)
    assert asked == [(built, (64,) * 4), (shorter, (48,) * 4), (naive, (64,) * 4)]
    assert found == [7 * MIB, 9 * MIB, 7 * MIB, 8 * MIB]


def test_the_largest_step() -> None:
    """As many tokens as the budget and the seats allow, in prompts as long as the context."""
    sizes = {"max_model_len": 64, "num_kv_slots": 512}
    assert full_step(build(tiny("llama_gqa"), stack(), max_num_seqs=4, max_num_batched_tokens=150, **sizes).config) == (64, 64, 22)
    assert full_step(build(tiny("llama_gqa"), stack(), max_num_seqs=4, max_num_batched_tokens=999, **sizes).config) == (64,) * 4
    assert full_step(build(tiny("llama_gqa"), stack("continuous"), max_num_seqs=4, **sizes).config) == (64,)


def kernel(name: str, allocator: str = "prefix") -> Stack:
    """As `stack`, with that kernel, and torch's ops, which call it layer by layer."""
    wanted = ("chunked", allocator, name, "torch")
    return next(s for s in STACKS if (s.scheduler.name, s.allocator.name, s.kernel.name, s.ops.name) == wanted)


KERNELS = sorted({(s.kernel.name, s.allocator.name) for s in STACKS if s.scheduler.name == "chunked" and s.allocator.name != "paged"})


@pytest.mark.parametrize(("name", "allocator"), KERNELS)
def test_a_full_step_goes_through_the_kernel(name: str, allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every layer, with every row's whole context; what attention takes is in the figure, and nothing is written to the pool."""
    one = build(tiny("llama_gqa"), kernel(name, allocator), max_num_seqs=3, max_model_len=64, num_kv_slots=512, debug=False)
    runner = one.engine.runner
    assert isinstance(runner, TorchRunner)
    seen: list[tuple[int, int, list[int]]] = []
    real = runner.kernel.write_and_attend

    def watched(q: Any, k: Any, v: Any, cache: Any, meta: Any, prepared: Any, layer: Any) -> Any:
        seen.append((layer.index, len(q), meta.seq_lens.tolist()))
        workspace = np.ones(40 * MIB, dtype=np.int8)
        out = real(q, k, v, cache, meta, prepared, layer)
        del workspace
        return out

    monkeypatch.setattr(runner.kernel, "write_and_attend", watched)
    meter = MemoryMeter(one.loaded.model)
    meter.begin(one)
    assert seen == [(layer.index, 192, [64, 64, 64]) for layer in one.loaded.model.layers]
    assert meter.activations > 35 * MIB
    assert not any(tensor.any() for layer in runner.tensors.device for tensor in layer)
    one.engine.close()


def test_other_models_are_not_among_the_other(built: BuiltEngine) -> None:
    """Their weights are in the process too, and no part of what this model needs."""
    alone = MemoryMeter(built.loaded.model).other
    assert MemoryMeter(built.loaded.model, beside=lambda: 30 * MIB).other == pytest.approx(alone - 30 * MIB, abs=5 * MIB)


def test_a_model_that_is_loaded_between_two_runs_is_not_in_the_peak(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, for example: the process holds its weights from then on, and none of the cells needs them."""
    others = 0
    meter = MemoryMeter(built.loaded.model, beside=lambda: others)
    monkeypatch.setattr(meter, "_highest", lambda: 900 * MIB + others)
    first = meter.table(built.pool).peak
    others = 500 * MIB
    assert meter.table(built.pool).peak == first == 900 * MIB


def test_an_engine_leaves_nothing_to_the_next_ones_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it freed goes back to the system when it is closed."""
    order: list[str] = []
    engines = Engines(registry())
    overrides = {"model": {"source": str(tiny("llama_gqa"))}, "engine": {"device": "cpu", "max_model_len": 64, "num_kv_slots": 128}}
    with engines.open(load_config(engines.registry, environ={}, overrides=overrides)) as one:
        monkeypatch.setattr(one.engine, "close", lambda: order.append("closed"))
        monkeypatch.setattr("octavo.bench.ablation.engines.give_back_memory", lambda: order.append("given back"))
    assert order == ["closed", "given back"]


def test_engines_know_what_other_models_are_loaded() -> None:
    """Each meter leaves out the weights of all but its own, those that came later too."""
    engines = Engines(registry())
    overrides = {"model": {"source": str(tiny("llama_gqa"))}, "engine": {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64}}
    half = load_config(engines.registry, environ={}, overrides=overrides)
    whole = replace(half, engine=half.engine.model_copy(update={"dtype": "float32"}))
    meter = engines.meter(half)
    assert meter._beside() == 0
    weights = [engines.loaded(config).model.weight_bytes() for config in (half, whole)]
    assert 0 < weights[0] < weights[1]
    assert (engines.meter(whole)._beside(), meter._beside()) == tuple(weights)


def test_a_saving_is_said_twice() -> None:
    """Half of a pool that is a tenth of the device is a twentieth of the device."""
    table = MemoryTable(device="x", total=1000, weights=300, kv_cache=100, activations=5, other=5, free=590, peak=410, num_slots=50)
    saving = table.saving(25)
    assert (saving.num_bytes, saving.of_pool, saving.of_device) == (50, 0.5, 0.05)
    assert str(saving) == "50.0% of the KV pool, 5.00% of the device"
    assert replace(table, total=500).saving(25).of_device == 0.1


def test_what_sharing_spares_stands_in_the_tables() -> None:
    """Of pool and device, in a run's report and in an ablation's, beside where the memory went."""
    run = timed("prefix", "continuous")
    memory = MemoryTable(
        device="x", total=1 << 34, weights=3 << 30, kv_cache=1 << 30, activations=0, other=0, free=0, peak=5 << 30, num_slots=60
    )
    run.memory = memory
    spared = memory.saving(run.account.saved_slots)
    assert spared.of_pool > 0 and f"Sharing spares {spared}." in run_report(run, plots=False).markdown
    result = twice_as_fast()
    for key, one in result.runs.items():
        if key[1] == "fast":
            one.memory, one.steps = memory, run.steps
    waste = (run.account.shares.internal + run.account.shares.external) / 100
    assert waste > 0
    (row,) = [line for line in markdown(result).splitlines() if "3.000 GiB" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "fast", "3.000 GiB", "1.000 GiB", "0.000 GiB", "0.000 GiB", "0.000 GiB", "5.000 GiB", f"{spared.of_pool:.1%}",
        f"{spared.of_device:.2%}", f"{-waste:.1%}", f"{-waste / 16:.2%}",
    ]  # fmt: skip


def test_less_waste_than_the_parent_is_said_twice() -> None:
    """A tenth of the pool was of no use, and half of that is left; the pool is a sixteenth of the device. Not where tokens differ."""
    memory = MemoryTable(
        device="x", total=1 << 34, weights=3 << 30, kv_cache=1 << 30, activations=0, other=0, free=0, peak=5 << 30, num_slots=100
    )

    def found(**fields: Any) -> dict[str, list[str]]:
        result = twice_as_fast(**fields)
        for key, one in result.runs.items():
            external = 5 if key[1] == "fast" else 10
            usage = replace(USAGE, external=external, free=70 - external)
            one.memory, one.steps = memory, [replace(line, usage_running=usage) for line in one.steps]
        lines = [line for line in markdown(result).splitlines() if "3.000 GiB" in line]
        return {cells[0]: cells[-2:] for line in lines if (cells := [cell.strip() for cell in line.strip("|").split("|")])}

    assert found() == {"base": ["-", "-"], "fast": ["5.0%", "0.31%"], f"base{AGAIN}": ["0.0%", "0.00%"]}
    assert found(outputs={"fast": OTHER})["fast"] == ["-", "-"]

"""What is counted is exact, what is measured adds up, and a saving is said of pool and device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.bench import memory_table as module
from octavo.bench.ablation.table import markdown
from octavo.bench.memory_table import MemoryMeter, MemoryTable, _forget_peak, full_step, resident_peak
from octavo.bench.reports.run_report import run_report
from octavo.core.assembly import BuiltEngine
from tests.bench.ablation.made import twice_as_fast
from tests.bench.measured import timed
from tests.bench.test_identity import stack
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
    meter.begin(num_tokens=64)
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
    """A forward pass of so many tokens, once for each size; the next run of another size has its own figure."""
    asked, peaks = [], iter([7 * MIB, 9 * MIB])
    monkeypatch.setattr(module, "_forward", lambda model, num_tokens: asked.append(num_tokens))
    meter = MemoryMeter(built.loaded.model)
    monkeypatch.setattr(meter, "_used", lambda: 0)
    monkeypatch.setattr(meter, "_highest", lambda: next(peaks))
    found = []
    for size in (full_step(built.config), 128, full_step(built.config)):
        meter.begin(num_tokens=size)
        found.append(meter.activations)
    assert asked == [2048, 128] and found == [7 * MIB, 9 * MIB, 7 * MIB]


def test_other_models_are_not_among_the_other(built: BuiltEngine) -> None:
    """Their weights are in the process too, and no part of what this model needs."""
    alone = MemoryMeter(built.loaded.model).other
    assert MemoryMeter(built.loaded.model, beside=30 * MIB).other == pytest.approx(alone - 30 * MIB, abs=5 * MIB)


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
    (row,) = [line for line in markdown(result).splitlines() if "3.000 GiB" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "fast", "3.000 GiB", "1.000 GiB", "0.000 GiB", "0.000 GiB", "0.000 GiB", "5.000 GiB", f"{spared.of_pool:.1%}",
        f"{spared.of_device:.2%}",
    ]  # fmt: skip

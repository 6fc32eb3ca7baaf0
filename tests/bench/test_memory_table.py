"""What is counted is exact, what is measured adds up, and a saving is said of pool and device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.bench.memory_table import MemoryMeter, MemoryTable, _forget_peak, resident_peak
from octavo.core.assembly import BuiltEngine
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
    meter = MemoryMeter(built.loaded.model, num_tokens=64)
    meter.begin()
    block = np.ones(60 * MIB, dtype=np.int8)
    del block
    table = meter.table(built.pool)
    assert table.weights == built.loaded.model.weight_bytes() and table.kv_cache == built.pool.num_bytes
    assert table.other > 50 * MIB and table.activations >= 0
    assert table.weights + table.other + 50 * MIB < table.peak < table.total
    assert 0 < table.free < table.total
    assert [name for name, _, _ in table.rows] == ["weights", "kv cache", "activations", "other", "free", "peak", "total"]
    assert table.rows[-1] == ("total", table.total, 1.0)


def test_a_saving_is_said_twice() -> None:
    """Half of a pool that is a tenth of the device is a twentieth of the device."""
    table = MemoryTable(device="x", total=1000, weights=300, kv_cache=100, activations=5, other=5, free=590, peak=410, num_slots=50)
    saving = table.saving(25)
    assert (saving.num_bytes, saving.of_pool, saving.of_device) == (50, 0.5, 0.05)
    assert str(saving) == "50.0% of the KV pool, 5.00% of the device"
    assert replace(table, total=500).saving(25).of_device == 0.1

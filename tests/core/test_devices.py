"""What is known of a device, and what is said where it is not there."""

from __future__ import annotations

import ctypes

import psutil
import pytest
import torch

from octavo.core import devices
from octavo.core.errors import ConfigError
from tests.models import load, tiny


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the CPU."""
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert devices.choose_device("auto").type == kind
    assert devices.choose_device("cpu") == torch.device("cpu")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """None at all, or fewer than the number asks for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda', but torch finds no CUDA device here; use 'cpu' or 'auto'"):
        devices.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda:2', but there are 2 CUDA devices, numbered from 0"):
        devices.choose_device("cuda:2")


@pytest.mark.parametrize("name", ["nonsense", "mps", "meta", "xpu:1"])
def test_other_devices_are_refused(name: str) -> None:
    """Also those that torch knows: their memory could not be sized."""
    with pytest.raises(ConfigError, match=f"engine.device = '{name}', but Octavo runs on 'cpu' and 'cuda'"):
        devices.choose_device(name)


def test_bf16_is_native_where_the_cpu_has_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU fp32 always is, fp16 never."""
    cpu = torch.device("cpu")
    for capabilities, native in (
        ({"avx2": True, "avx512_bf16": False}, {"float32"}),
        ({"avx512_bf16": True}, {"float32", "bfloat16"}),
        ({"amx_bf16": True, "l1d_cache_size": 32768}, {"float32", "bfloat16"}),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert devices.native_dtypes(cpu) == native


def test_bf16_is_native_on_gpus_since_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 and fp32 are on all."""
    for capability, native in (((7, 5), {"float32", "float16"}), ((8, 0), {"float32", "float16", "bfloat16"})):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert devices.native_dtypes(torch.device("cuda")) == native
        assert devices.capability(torch.device("cuda")) == capability
    assert devices.capability(torch.device("cpu")) is None


def test_memory_of_a_cpu_is_ram() -> None:
    """In bytes; what is available is part of it."""
    memory = devices.device_memory(torch.device("cpu"))
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.available <= memory.total


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names the free bytes first."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 10))
    memory = devices.device_memory(torch.device("cuda"))
    assert (memory.available, memory.total) == (3, 10)


def test_nothing_is_reserved_on_a_cpu() -> None:
    """Its pool is sized otherwise, so no forward pass is spent on it."""
    assert devices.measure_reserved(load(tiny("llama_gqa")), num_tokens=64, num_rows=4) == 0


def test_a_device_in_words() -> None:
    """For logs: kind, cores and threads."""
    assert devices.describe_device(torch.device("cpu")).startswith("cpu, ")
    assert devices.describe_device(torch.device("cpu")).endswith(f"{torch.get_num_threads()} threads")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_memory_that_was_freed_is_given_back() -> None:
    """128 MiB in small pieces with one kept at the end: freeing them alone leaves them with the process."""
    pieces = [torch.ones(16 * 1024, dtype=torch.float32) for _ in range(2048)]
    last = torch.ones(16 * 1024)
    pieces.clear()
    before = psutil.Process().memory_info().rss
    devices.give_back_memory()
    assert before - psutil.Process().memory_info().rss > 64 * 2**20
    assert last.sum() == 16 * 1024

"""What is known of the device that a model runs on: its types, its memory, what a forward pass takes.

The one place that asks torch about hardware. Must not know: plugins, requests.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
import psutil
import torch

from octavo.core.errors import ConfigError
from octavo.core.memory import DeviceMemory
from octavo.core.model import Model
from octavo.core.scoring import score_rows


def choose_device(name: str) -> torch.device:
    """The device of that name, a CPU or a CUDA one; `auto` is the first GPU, else the CPU. Raises ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.device = {name!r}, but Octavo runs on 'cpu' and 'cuda' ('cuda:1' is the second GPU) only, or choose 'auto'"
        )
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device = {name!r}, but torch finds no CUDA device here; use 'cpu' or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"engine.device = {name!r}, but there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def native_dtypes(device: torch.device) -> frozenset[str]:
    """Types that the device computes in with instructions of its own; others run, but slowly."""
    if device.type == "cuda":
        return frozenset({"float32", "float16"} | ({"bfloat16"} if torch.cuda.get_device_capability(device) >= (8, 0) else set()))
    found = torch.cpu.get_capabilities()  # avx512_bf16, amx_bf16, and Arm's
    return frozenset({"float32"} | ({"bfloat16"} if any(on is True and name.endswith("bf16") for name, on in found.items()) else set()))


def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability; None elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def describe_device(device: torch.device) -> str:
    """The device in words, for logs and results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def device_memory(device: torch.device) -> DeviceMemory:
    """Total and available bytes of the device; of RAM on a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, available=free)
    memory = psutil.virtual_memory()
    return DeviceMemory(total=memory.total, available=memory.available)


def give_back_memory() -> None:
    """Give the system what this process freed and its allocator keeps (glibc's malloc_trim(3)); elsewhere nothing happens.

    Loading leaves a tensor's worth of pages or more behind, which a step never asks for again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def measure_reserved(model: Model, *, num_tokens: int, num_rows: int) -> int:
    """Bytes of the GPU that are not for KV: what is in use now (weights, other processes), and the peak of a forward pass beyond it.

    The pass runs `num_tokens` tokens with logits for `num_rows`, and scores them as a prompt's; attention is left out. 0 on a CPU, where
    the pool is sized otherwise.
    """
    if model.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
    rows = torch.arange(min(num_rows, num_tokens), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        hidden = model.forward(ids, ids, lambda layer, q, k, v: q.new_zeros(*q.shape[:2], v.shape[2]), rows=rows)
        model.logits(hidden)
        score_rows(lambda part: model.logits(hidden[part]), ids[rows], np.ones(len(rows), dtype=np.int64))
    activations = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    return total - free + activations

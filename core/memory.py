"""How large the KV pool is, and what the log says of it.

A sequence of n tokens takes n slots. A slot takes what the kernel's cache specs say for all layers; for an unquantised cache that is
2 x layers x KV heads x head size x bytes of the type. Must not know: torch, how an allocator divides the pool.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from octavo.core.descriptors import ModelShape
from octavo.core.errors import ConfigError

GIB = 1 << 30
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


def kv_bytes_per_token(shape: ModelShape, kv_dtype: str) -> int:
    """Bytes of K and V of one token in all layers (grouped heads counted as they are stored)."""
    return shape.num_layers * shape.num_kv_heads * (shape.head_size_k + shape.head_size_v) * BYTES_OF[kv_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of the device that KV can live on. For a CPU: RAM."""

    total: int
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The KV pool in slots, and why it is that large."""

    num_slots: int
    num_host_slots: int
    slot_bytes: int
    on_gpu: bool
    reason: str
    block_size: int = 0  # 0: a pool that is not divided into blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool on the device."""
        return self.num_slots * self.slot_bytes

    def divided(self, num_slots: int, *, num_host_slots: int, block_size: int) -> PoolSize:
        """What an allocator made of it: whole blocks, perhaps."""
        return replace(self, num_slots=num_slots, num_host_slots=num_host_slots, block_size=block_size)

    def check(self, max_model_len: int) -> None:
        """Raise ConfigError with the numbers if it cannot hold one request of `max_model_len`."""
        if self.num_slots < max_model_len:
            needed = max_model_len * self.slot_bytes / GIB
            raise ConfigError(
                f"the KV pool ({self.reason}) has {self.num_slots} slots of {self.slot_bytes} bytes and cannot hold one request of "
                f"max_model_len {max_model_len}: lower max_model_len, or give it more ({needed:.2f} GiB are needed)"
            )

    def concurrency(self, max_model_len: int) -> float:
        """How many requests of this length the pool holds at once."""
        return self.num_slots / max_model_len

    def log_lines(self, max_model_len: int) -> list[str]:
        """What is logged at start."""
        if not self.block_size:
            size = f"# KV slots: {self.num_slots}"
        else:
            size = f"# {'GPU' if self.on_gpu else 'KV'} blocks: {self.num_slots // self.block_size}"
        if self.num_host_slots:
            unit, each = ("blocks", self.block_size) if self.block_size else ("slots", 1)
            size += f", # CPU {unit}: {self.num_host_slots // each}"
        return [
            f"KV pool: {self.num_bytes / GIB:.2f} GiB, {self.num_slots} slots of {self.slot_bytes} bytes ({self.reason})",
            size,
            f"Maximum concurrency for {max_model_len} tokens per request: {self.concurrency(max_model_len):.2f}x",
        ]


def size_pool(
    *,
    slot_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    device: DeviceMemory,
    on_gpu: bool,
    reserved_bytes: int = 0,
    gpu_memory_utilization: float = 0.92,
    kv_cache_memory: int | None = None,
    num_kv_slots: int | None = None,
    swap_space: float = 0.0,
    host_total: int = sys.maxsize,
) -> PoolSize:
    """Slots of the pool, before an allocator divides it.

    In this order: `num_kv_slots`; `kv_cache_memory` bytes; on a GPU the share `gpu_memory_utilization` of the whole device less
    `reserved_bytes` (weights, activations, others' memory); on a CPU the smaller of a quarter of the available RAM and what
    `max_num_seqs` requests of `max_model_len` need. `swap_space` is in GiB of host memory, which has
    `host_total` bytes. Raises ConfigError as `PoolSize.check`.
    """
    if num_kv_slots is not None:
        slots, reason = num_kv_slots, "num_kv_slots"
    elif kv_cache_memory is not None:
        slots, reason = kv_cache_memory // slot_bytes, "kv_cache_memory"
    elif on_gpu:
        free = int(device.total * gpu_memory_utilization) - reserved_bytes
        slots, reason = max(0, free) // slot_bytes, f"gpu_memory_utilization {gpu_memory_utilization} of {device.total / GIB:.1f} GiB"
    else:
        quarter, wanted = device.available // 4 // slot_bytes, max_num_seqs * max_model_len
        slots = min(quarter, wanted)
        reason = "a quarter of the available RAM" if quarter < wanted else f"max_num_seqs {max_num_seqs} x max_model_len {max_model_len}"
    size = PoolSize(
        num_slots=slots,
        num_host_slots=int(swap_space * GIB) // slot_bytes,
        slot_bytes=slot_bytes,
        on_gpu=on_gpu,
        reason=reason,
    )
    size.check(max_model_len)
    if swap_space * GIB > host_total:
        raise ConfigError(f"swap_space = {swap_space:g} GiB is more than the host's {host_total / GIB:.1f} GiB of memory: make it smaller")
    if size.num_bytes > device.total:
        raise ConfigError(
            f"the KV pool ({reason}) of {slots} slots x {slot_bytes} bytes = {size.num_bytes / GIB:.1f} GiB is more than the device's "
            f"{device.total / GIB:.1f} GiB of memory: make it smaller"
        )
    return size

"""Where memory goes: weights, KV pool, activations, other, free, and the peak of a run. On a CPU by the process's resident memory.

A saving of KV slots is said twice, of the pool and of the device: a pool that is a tenth of the device saves a tenth of what it seems.
Weights and pool are counted, the rest is measured. Must not know: what ran, requests.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from octavo.core.devices import describe_device, device_memory
from octavo.core.memory import PoolSize
from octavo.core.model import Model
from octavo.core.settings.resolve import ResolvedConfig


@dataclass(frozen=True, slots=True)
class Saving:
    """Bytes of the KV pool that something spares."""

    num_bytes: int
    of_pool: float  # shares, 0 to 1
    of_device: float

    def __str__(self) -> str:
        return f"{self.of_pool:.1%} of the KV pool, {self.of_device:.2%} of the device"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Bytes. weights + kv_cache + activations + other is what the process may need; `peak` is the most that it had during the run."""

    device: str
    total: int
    weights: int
    kv_cache: int  # the pool as it was sized, written or not
    activations: int  # a forward pass of a full step, beyond what was there before
    other: int  # interpreter, libraries, the device's context
    free: int  # on the device at the run's end, whoever else uses it
    peak: int
    num_slots: int

    @property
    def rows(self) -> list[tuple[str, int, float]]:
        """Name, bytes, share of the device."""
        names = ("weights", "kv_cache", "activations", "other", "free", "peak", "total")
        return [(name.replace("_", " "), int(getattr(self, name)), getattr(self, name) / self.total) for name in names]

    def saving(self, slots: float) -> Saving:
        """What so many slots fewer spare."""
        share = slots / self.num_slots
        return Saving(round(share * self.kv_cache), share, share * self.kv_cache / self.total)


def full_step(config: ResolvedConfig) -> int:
    """Tokens of the largest step."""
    return config.scheduler_options.max_num_batched_tokens or config.max_model_len


class MemoryMeter:
    """Made when the model is loaded and no pool is there yet; `begin` a run, and ask for its `table` afterwards."""

    def __init__(self, model: Model, *, beside: int = 0) -> None:
        """`beside`: bytes of weights of other models that the process holds, which are no part of what this one needs."""
        self._model = model
        self._on_gpu = model.device.type == "cuda"
        self.other = max(0, self._used() - model.weight_bytes() - beside)
        self.activations = 0
        self._seen: dict[int, int] = {}

    def begin(self, *, num_tokens: int) -> None:
        """A run starts, whose steps have up to `num_tokens` tokens: the peak is counted from now on.

        The first time for that many, runs a forward pass of them, without attention, to see what it takes.
        """
        if num_tokens not in self._seen:
            used = self._used()
            self._reset()
            _forward(self._model, num_tokens)
            self._seen[num_tokens] = max(0, self._highest() - used)
            if self._on_gpu:
                torch.cuda.empty_cache()
        self.activations = self._seen[num_tokens]
        self._reset()

    def table(self, pool: PoolSize) -> MemoryTable:
        """Of what ran since `begin`, with this pool."""
        memory = device_memory(self._model.device)
        return MemoryTable(
            device=describe_device(self._model.device),
            total=memory.total,
            weights=self._model.weight_bytes(),
            kv_cache=pool.num_bytes,
            activations=self.activations,
            other=self.other,
            free=memory.available,
            peak=self._highest(),
            num_slots=pool.num_slots,
        )

    def _used(self) -> int:
        """Bytes that this process has now; on a GPU, what all have that share it."""
        if self._on_gpu:
            memory = device_memory(self._model.device)
            return memory.total - memory.available
        return int(psutil.Process().memory_info().rss)

    def _reset(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._model.device)
            torch.cuda.reset_peak_memory_stats(self._model.device)
        else:
            _forget_peak()

    def _highest(self) -> int:
        """The most since the last reset."""
        if not self._on_gpu:
            return resident_peak()
        device = self._model.device
        return int(self._used() - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_reserved(device))


def _forward(model: Model, num_tokens: int) -> None:
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        hidden = model.forward(ids, ids, lambda layer, q, k, v: q.new_zeros(*q.shape[:2], v.shape[2]), rows=ids[:1])
        model.logits(hidden)


def resident_peak() -> int:
    """The most resident bytes that this process had since the kernel was told to forget the last peak, or since it began."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    with suppress(OSError):  # another system, or not allowed: the peak is that of the whole process so far
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size

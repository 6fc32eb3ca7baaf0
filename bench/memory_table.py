"""Where memory goes: weights, KV pool, activations, other, free, and the peak of a run. On a CPU by the process's resident memory.

A saving of KV slots is said twice, of the pool and of the device: a pool that is a tenth of the device saves a tenth of what it seems.
Weights and pool are counted, the rest is measured. Must not know: what ran, requests.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from octavo.core.assembly import BuiltEngine
from octavo.core.attention import AttentionMetadata, StepAttention
from octavo.core.devices import describe_device, device_memory, give_back_memory
from octavo.core.memory import PoolSize
from octavo.core.model import Model
from octavo.core.settings.resolve import ResolvedConfig
from octavo.core.torch_runner import TorchRunner


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
    """Bytes. weights + kv_cache + activations + other is what the process may need; `peak` is the most that it had during the run.

    Other models that the process holds are in neither.
    """

    device: str
    total: int
    weights: int
    kv_cache: int  # the pool as it was sized, written or not
    activations: int  # a full step's, what attention needs among them, beyond what was there before
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


def full_step(config: ResolvedConfig) -> tuple[int, ...]:
    """Tokens of each row of the largest step: prompts as long as a context may be, as many as its budget and its seats allow."""
    options, longest = config.scheduler_options, config.max_model_len
    tokens = min(options.max_num_batched_tokens or longest, options.max_num_seqs * longest)
    rest = (tokens % longest,) if tokens % longest else ()
    return (longest,) * (tokens // longest) + rest


class MemoryMeter:
    """Made when the model is loaded and no pool is there yet; `begin` a run, and ask for its `table` afterwards."""

    def __init__(self, model: Model, *, beside: Callable[[], int] = lambda: 0) -> None:
        """`beside`: bytes of weights of other models that the process holds now, which are no part of what this one needs."""
        self._model = model
        self._beside = beside
        self._on_gpu = model.device.type == "cuda"
        give_back_memory()
        self.other = max(0, self._used() - model.weight_bytes() - beside())
        self.activations = 0
        self._seen: dict[object, int] = {}

    def begin(self, built: BuiltEngine) -> None:
        """A run of this engine, which has nothing to do yet, starts: the peak is counted from now on.

        The first time for such a stack and such steps, runs a full step through its kernel, to see what it takes.
        """
        lengths, kv, kernel = full_step(built.config), built.engine.kv, built.config.stack.kernel
        seats = built.config.scheduler_options.max_num_seqs
        kind = kernel.name, kernel.options.model_dump_json(), kv.layout, kv.block_size, seats, lengths
        if kind not in self._seen:
            give_back_memory()
            used = self._used()
            self._reset()
            run_step(built, lengths)
            self._seen[kind] = max(0, self._highest() - used)
            if self._on_gpu:
                torch.cuda.empty_cache()
        self.activations = self._seen[kind]
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
            peak=self._highest() - self._beside(),
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


@torch.inference_mode()
def run_step(built: BuiltEngine, lengths: Sequence[int]) -> None:
    """A step of prompts of these lengths, each within the pool, with logits of as many tokens as there are seats.

    Through the engine's kernel and over its cache, into which nothing is written: all rows lie in the same slots.
    Raises TypeError for an engine that runs no model.
    """
    runner, kv, model = built.engine.runner, built.engine.kv, built.loaded.model
    if not isinstance(runner, TorchRunner):
        raise TypeError(f"{type(runner).__name__} runs no model whose memory could be measured")
    rows, longest, tokens, device = len(lengths), max(lengths), sum(lengths), model.device
    blocks = torch.arange(-(-longest // kv.block_size), dtype=torch.int32, device=device) if kv.layout == "block_table" else None
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    meta = AttentionMetadata(
        query_start=torch.cat((seq_lens.new_zeros(1), seq_lens.cumsum(0, dtype=torch.int32))),
        seq_lens=seq_lens,
        slots=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        max_query_len=longest,
        max_seq_len=longest,
        region_starts=seq_lens.new_zeros(rows) if blocks is None else None,
        block_table=None if blocks is None else blocks.repeat(rows, 1),
        block_size=kv.block_size,
    )
    attend = StepAttention(runner.kernel, runner.tensors.device, meta)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    drawn = torch.arange(min(built.config.scheduler_options.max_num_seqs, tokens), device=device)
    model.logits(model.forward(ids, positions, attend, rows=drawn))


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

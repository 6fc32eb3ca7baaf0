"""The KV pool as tensors, on the device and in host memory, and the transfers between their slots.

Must not know: who owns a slot, plans, models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence as Seq

import numpy as np
import torch

from octavo.core.attention import Kernel, LayerCache
from octavo.core.plan import Transfer

LINE = 64  # bytes of a cache line, on whose start torch's tensors lie too
LONGEST_FUSED = 256  # slots; longer ones take a slice each, which needs no list of indices


def allocate_cache(kernel: Kernel, num_slots: int, device: torch.device, *, fill: float | None = None) -> list[LayerCache]:
    """Cache tensors [num_slots, *shape] of every layer, as the kernel's specs say.

    `fill` (NaN, say) shows who reads slots that nobody wrote; None leaves zeros, which on a CPU take no memory until touched.
    """
    caches: list[LayerCache] = []
    for layer in kernel.layers:
        tensors = tuple(_zeros((num_slots, *spec.shape), spec.dtype, device) for spec in kernel.cache_spec(layer))
        if fill is not None:
            for tensor in tensors:
                tensor.fill_(fill)
        caches.append(tensors)
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, on a CPU from numpy: it takes pages as the system hands them out, cleared when they are first touched. torch clears a pool
    of gigabytes at once, which takes seconds and the memory. numpy also asks for huge pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def fused(transfers: Seq[Transfer]) -> Iterator[list[Transfer]]:
    """Cut the list into runs of neighbours of one kind that can be done at once, and again if they were interrupted.

    In a run nothing is written twice, and nothing that is read is written. Reading a slot twice is fine.
    """
    run: list[Transfer] = []
    read: set[int] = set()
    written: set[int] = set()
    for transfer in transfers:
        sources = range(transfer.source, transfer.source + transfer.count)
        targets = range(transfer.target, transfer.target + transfer.count)
        joins = bool(run) and run[0].kind == transfer.kind and max(run[0].count, transfer.count) <= LONGEST_FUSED
        joins = joins and written.isdisjoint(targets)
        if transfer.kind == "copy":  # the only kind whose two sides are in one memory
            joins = joins and written.isdisjoint(sources) and read.isdisjoint(targets)
        if run and not joins:
            yield run
            run, read, written = [], set(), set()
        run.append(transfer)
        if transfer.count <= LONGEST_FUSED:
            read.update(sources)
            written.update(targets)
    if run:
        yield run


class KVTensors:
    """`device` and `host`: the cache of each layer in the two memories."""

    def __init__(self, kernel: Kernel, *, num_slots: int, num_host_slots: int, device: torch.device, fill: float | None = None) -> None:
        self.device = allocate_cache(kernel, num_slots, device, fill=fill)
        self.host = allocate_cache(kernel, num_host_slots, torch.device("cpu"), fill=fill)

    @torch.inference_mode()
    def move(self, run: Seq[Transfer]) -> None:
        """Do one run of `fused`: a slice a tensor if it is alone, else a gather and a scatter, however many blocks they are."""
        kind = run[0].kind
        sources = self.host if kind == "in" else self.device
        targets = self.host if kind == "out" else self.device
        read = _slots([(transfer.source, transfer.count) for transfer in run], sources)
        write = _slots([(transfer.target, transfer.count) for transfer in run], targets)
        for source_tensors, target_tensors in zip(sources, targets, strict=True):
            for source, target in zip(source_tensors, target_tensors, strict=True):
                target[write] = source[read].to(target.device)

    def free(self) -> None:
        """Give the memory back."""
        self.device, self.host = [], []


def _slots(places: list[tuple[int, int]], caches: list[LayerCache]) -> slice | torch.Tensor:
    """(start, count) of one side of a run as an index into tensors of that memory."""
    if len(places) == 1:
        [(start, count)] = places
        return slice(start, start + count)
    return torch.tensor([slot for start, count in places for slot in range(start, start + count)], device=caches[0][0].device)

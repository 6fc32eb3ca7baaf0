"""Attention by the native library (core/native/attention.h): one call a layer to write, one to attend.

The cache is read in place. Every layer of a step shares a plan, made once for layers of one shape and window. A row's result depends on
nothing but the row: not on the other rows, nor on the number of threads. Must not know: how tokens came to their slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.attention import AttentionMetadata, Kernel, LayerCache, LayerSpec
from octavo.core.errors import PluginContractError
from octavo.core.native import Library
from octavo.plugins.kernels.cpu_paged.structures import Item, Layer, Merge, Step

_LINE = 64  # bytes of a cache line
_SERIAL_WRITE = 64 * 1024  # bytes that are written faster by one thread than two can be set to it

_Shape = tuple[int | None, int, int, int, int]


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """`plans`: by shape, the arguments of `attention` that come after the layer; `kept`: what their addresses point into."""

    slots: torch.Tensor
    threads: int
    plans: dict[_Shape, tuple[int, ...]]
    kept: list[Any]


class CpuPagedKernel(Kernel):
    """Paged attention of the native library. Tensors of another dtype, device or shape: PluginContractError."""

    def __init__(self, layers: Sequence[LayerSpec], *, dtype: torch.dtype, device: torch.device, library: Library) -> None:
        super().__init__(layers, dtype=dtype, device=device)
        self._library = library
        self._element = dtype.itemsize
        self._layers = {spec.index: Layer.of(spec, dtype) for spec in self.layers}
        self._addresses = {
            index: (ctypes.addressof(layer), layer.heads, layer.k_size, layer.v_size) for index, layer in self._layers.items()
        }
        self._shapes = {spec.index: _shape(spec) for spec in self.layers}
        self._memory = torch.empty(0, dtype=torch.uint8)  # of the threads, and partial results; it grows to the largest step's need

    def prepare(self, meta: AttentionMetadata) -> _Step:
        """What each thread does, for each distinct shape of layers."""
        if meta.slots.dtype is not torch.int64 or not meta.slots.is_cpu or meta.slots.dim() != 1:
            raise PluginContractError(
                f"kernel 'cpu_paged': slots must be torch.int64 [T] on a CPU, not {meta.slots.dtype} {list(meta.slots.shape)} "
                f"on {meta.slots.device}"
            )
        step = Step.of(meta)
        threads = torch.get_num_threads()
        kept: list[Any] = [step]
        plans: dict[_Shape, tuple[int, ...]] = {}
        needed = 0
        found: dict[_Shape, tuple[int, list[int], torch.Tensor]] = {}
        sizes = (c_int64 * 5)()
        for index, shape in self._shapes.items():
            if shape in found:
                continue
            arguments = self._addresses[index][0], ctypes.addressof(step)
            self._library.attention_plan(*arguments, 0, 0, ctypes.addressof(sizes))
            items, merges, records, thread_bytes, record_bytes = sizes
            plan = torch.empty(items * ctypes.sizeof(Item) + merges * ctypes.sizeof(Merge), dtype=torch.uint8)
            merges_at = plan.data_ptr() + items * ctypes.sizeof(Item)
            self._library.attention_plan(*arguments, plan.data_ptr(), merges_at, ctypes.addressof(sizes))
            used = max(1, min(threads, items))
            needed = max(needed, used * thread_bytes + records * record_bytes)
            found[shape] = used, [ctypes.addressof(step), plan.data_ptr(), items, merges_at, merges, thread_bytes], plan
        if needed + _LINE > len(self._memory):
            self._memory = torch.empty(needed + needed // 4 + _LINE, dtype=torch.uint8)
        memory = -(-self._memory.data_ptr() // _LINE) * _LINE
        for shape, (used, arguments_of_plan, plan) in found.items():
            plans[shape] = (used, memory, *arguments_of_plan)
            kept.append(plan)
        kept.append(self._memory)
        return _Step(meta.slots.contiguous(), threads, plans, kept)

    def write(self, cache: LayerCache, k: torch.Tensor, v: torch.Tensor, meta: AttentionMetadata, prepared: Any) -> None:
        """As `Kernel.write`."""
        k_cache, v_cache = cache
        tokens = prepared.slots.shape[0]
        k = self._dense(k, "k", (tokens, *k_cache.shape[1:]))
        v = self._dense(v, "v", (tokens, *v_cache.shape[1:]))
        _, heads, size = k.shape
        few = tokens * heads * size * self._element <= _SERIAL_WRITE
        self._library.attention_write(
            heads,
            size * self._element,
            v.shape[2] * self._element,
            self._element,
            prepared.slots.data_ptr(),
            tokens,
            k.data_ptr(),
            *k.stride()[:2],
            v.data_ptr(),
            *v.stride()[:2],
            k_cache.data_ptr(),
            *k_cache.stride()[:2],
            v_cache.data_ptr(),
            *v_cache.stride()[:2],
            1 if few else prepared.threads,
        )

    def attend(self, q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, prepared: Any, layer: LayerSpec) -> torch.Tensor:
        """q [T, H, Dk] -> [T, H, Dv] in q's dtype; tokens of empty rows, and behind the last row, get zeros."""
        address, heads, k_size, v_size = self._addresses[layer.index]
        tokens = prepared.slots.shape[0]
        q = self._dense(q, "q", (tokens, heads, k_size))
        output = torch.empty((tokens, heads, v_size), dtype=self.dtype)
        k_cache, v_cache = cache
        self._library.attention(
            address,
            *prepared.plans[self._shapes[layer.index]],
            q.data_ptr(),
            *q.stride()[:2],
            k_cache.data_ptr(),
            *k_cache.stride()[:2],
            v_cache.data_ptr(),
            *v_cache.stride()[:2],
            output.data_ptr(),
        )
        return output

    def _dense(self, tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, copied where the elements of a head do not follow each other: the library reads addresses and checks nothing."""
        if tensor.dtype is not self.dtype or not tensor.is_cpu or tensor.shape != shape:
            raise PluginContractError(
                f"kernel 'cpu_paged': {name} must be {self.dtype} {list(shape)} on a CPU; the model gave {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _shape(layer: LayerSpec) -> _Shape:
    """Layers of one shape share a plan."""
    return layer.window, layer.num_heads, layer.num_kv_heads, layer.head_size_k, layer.head_size_v

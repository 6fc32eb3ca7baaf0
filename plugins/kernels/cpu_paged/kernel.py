"""Attention by the native library (core/native/attention.h): one call a layer writes and attends.

The cache is read in place. Every layer of a step shares a plan, made once for layers of one shape and window. A row's result depends on
nothing but the row: not on the other rows, nor on the number of threads. Must not know: how tokens came to their slots.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.core.attention import AttentionMetadata, Kernel, LayerCache, LayerSpec
from octavo.core.errors import PluginContractError
from octavo.core.native import AttentionCall, Library, NativeAttention
from octavo.plugins.kernels.cpu_paged.structures import Cache, Item, Layer, Merge, Plan, Step

_LINE = 64  # bytes of a cache line

_Shape = tuple[int | None, int, int, int, int]


@dataclass(eq=False, slots=True)
class _Step:
    """`plans`: by shape of layers, the address of a Plan; `kept`: what addresses point into."""

    slots: torch.Tensor
    threads: int
    plans: dict[_Shape, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


class _Layer:
    """A layer of the kernel: its struct, and that of the cache it was last called with."""

    def __init__(self, spec: LayerSpec, dtype: torch.dtype) -> None:
        self._struct = Layer.of(spec, dtype)
        self.address = ctypes.addressof(self._struct)
        self.shape = spec.window, spec.num_heads, spec.num_kv_heads, spec.head_size_k, spec.head_size_v
        self.q = spec.num_heads, spec.head_size_k  # of a token
        self.k = spec.num_kv_heads, spec.head_size_k
        self.v = spec.num_kv_heads, spec.head_size_v
        self.out = spec.num_heads, spec.head_size_v
        self._cache = Cache()
        self._cache_address = ctypes.addressof(self._cache)
        self._bound: tuple[Any, Any] = (lambda: None, lambda: None)

    def cache_address(self, cache: LayerCache) -> int:
        """Of the struct of these tensors, made anew where they are not those of the last call; it does not keep them alive."""
        k, v = cache
        if self._bound[0]() is not k or self._bound[1]() is not v:
            self._bound = weakref.ref(k), weakref.ref(v)
            self._cache = Cache.of(k, v)
            self._cache_address = ctypes.addressof(self._cache)
        return self._cache_address


class CpuPagedKernel(Kernel):
    """Paged attention of the native library. Tensors of another dtype, device or shape: PluginContractError."""

    def __init__(self, layers: Sequence[LayerSpec], *, dtype: torch.dtype, device: torch.device, library: Library) -> None:
        super().__init__(layers, dtype=dtype, device=device)
        self._library = library
        self._layers = {spec.index: _Layer(spec, dtype) for spec in self.layers}
        self._kinds = {layer.shape: layer.address for layer in self._layers.values()}  # one layer of each shape
        self._shapes = tuple((spec.num_heads, spec.num_kv_heads, spec.head_size_k, spec.head_size_v) for spec in self.layers)
        self._memory = torch.empty(0, dtype=torch.uint8)  # of the threads, and partial results; it grows to the largest step's need

    def prepare(self, meta: AttentionMetadata) -> _Step:
        """What each thread does, for each distinct shape of layers."""
        if meta.slots.dtype is not torch.int64 or not meta.slots.is_cpu or meta.slots.dim() != 1:
            raise PluginContractError(
                f"kernel 'cpu_paged': slots must be torch.int64 [T] on a CPU, not {meta.slots.dtype} {list(meta.slots.shape)} "
                f"on {meta.slots.device}"
            )
        native_step = Step.of(meta)
        step = _Step(meta.slots.contiguous(), torch.get_num_threads(), kept=[native_step])
        plans = {shape: self._plan(layer, native_step, step) for shape, layer in self._kinds.items()}
        needed = max((num_bytes for _, num_bytes in plans.values()), default=0) + _LINE
        if needed > len(self._memory):
            self._memory = torch.empty(needed + needed // 4, dtype=torch.uint8)
        step.kept.append(self._memory)
        for shape, (plan, _) in plans.items():
            plan.memory = -(-self._memory.data_ptr() // _LINE) * _LINE
            step.plans[shape] = ctypes.addressof(plan)
        return step

    def _plan(self, layer: int, native_step: Step, step: _Step) -> tuple[Plan, int]:
        """The plan of layers like that at address `layer`, kept by `step`, and the bytes of memory that it needs."""
        sizes = (c_int64 * 5)()
        arguments = layer, ctypes.addressof(native_step)
        self._library.attention_plan(*arguments, 0, 0, ctypes.addressof(sizes))
        items, merges, records, thread_bytes, record_bytes = sizes
        memory = torch.empty(items * ctypes.sizeof(Item) + merges * ctypes.sizeof(Merge), dtype=torch.uint8)
        items_at = memory.data_ptr()
        merges_at = items_at + items * ctypes.sizeof(Item)
        self._library.attention_plan(*arguments, items_at, merges_at, ctypes.addressof(sizes))
        threads = max(1, min(step.threads, items))
        plan = Plan(arguments[1], step.slots.data_ptr(), items_at, merges_at, items, merges, 0, thread_bytes, threads)
        step.kept += [memory, plan]
        return plan, threads * thread_bytes + records * record_bytes

    def attend(self, q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, prepared: Any, layer: LayerSpec) -> torch.Tensor:
        """q [T, H, Dk] -> [T, H, Dv] in q's dtype; tokens of empty rows, and behind the last row, get zeros."""
        own = self._layers[layer.index]
        tokens = len(prepared.slots)
        q = self._dense(q, "q", (tokens, *own.q))
        output = torch.empty((tokens, *own.out), dtype=self.dtype)
        at, strides = q.data_ptr(), q.stride()
        self._library.attention(
            own.address, own.cache_address(cache), prepared.plans[own.shape], at, *strides[:2], 0, 0, 0, 0, 0, 0, output.data_ptr()
        )
        return output

    def write_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        meta: AttentionMetadata,
        prepared: Any,
        layer: LayerSpec,
    ) -> torch.Tensor:
        """As `Kernel.write_and_attend`, in one call: of a decoding step, calls are a tenth."""
        own = self._layers[layer.index]
        tokens = len(prepared.slots)
        q = self._dense(q, "q", (tokens, *own.q))
        k = self._dense(k, "k", (tokens, *own.k))
        v = self._dense(v, "v", (tokens, *own.v))
        output = torch.empty((tokens, *own.out), dtype=self.dtype)
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        self._library.attention(
            own.address,
            own.cache_address(cache),
            prepared.plans[own.shape],
            q.data_ptr(),
            q_strides[0],
            q_strides[1],
            k.data_ptr(),
            k_strides[0],
            k_strides[1],
            v.data_ptr(),
            v_strides[0],
            v_strides[1],
            output.data_ptr(),
        )
        return output

    def native_calls(self, caches: Sequence[LayerCache], prepared: _Step) -> NativeAttention:
        """As `Kernel.native_calls`."""
        calls = (AttentionCall * len(self.layers))()
        for call, spec in zip(calls, self.layers, strict=True):
            layer = self._layers[spec.index]
            call.layer, call.cache, call.plan = layer.address, layer.cache_address(caches[spec.index]), prepared.plans[layer.shape]
        return NativeAttention(library=self._library, calls=calls, tokens=len(prepared.slots), dtype=self.dtype, shapes=self._shapes)

    def _dense(self, tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, copied where the elements of a head do not follow each other: the library reads addresses and checks nothing."""
        if tensor.dtype is not self.dtype or not tensor.is_cpu or tensor.shape != shape:
            raise PluginContractError(
                f"kernel 'cpu_paged': {name} must be {self.dtype} {list(shape)} on a CPU; the model gave {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

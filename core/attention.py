"""What an attention kernel is, and the metadata of one step that it reads.

Symbols: T tokens of a step, B sequences (chunks) of a step, S slots of the KV pool, H query heads, G KV heads, D head size.
A kernel must not know requests, plans, schedulers or allocators: only token counts, slots and, by layout, regions or block tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from octavo.core.errors import PluginContractError

if TYPE_CHECKING:
    from octavo.core.native import NativeAttention


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSpec:
    """Attention of one layer, fixed when the model is built.

    A query at position i sees keys at positions j with `i - window < j <= i` (all j <= i where window is None).
    Scores are `q . k * scale`, then, with a soft-cap, `softcap * tanh(scores / softcap)` (Gemma 2).
    `sinks` [H] are extra logits, one a head, that take part in the softmax and have no value (gpt-oss).
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer's cache: [num_slots, *shape] of `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one slot (one token of one layer) takes in this tensor."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMetadata:
    """Which tokens of a flattened batch belong to which sequence, and where their KV lies.

    Row b owns tokens `query_start[b] : query_start[b + 1]`; they are the last ones of its `seq_lens[b]` positions. A row with
    `seq_lens[b] == 0` is padding: its output is finite and unused. `slots[t]` is where token t's K and V are written, -1: nowhere.

    Exactly one of the two layouts is given:
      region       position p of row b lies in slot `region_starts[b] + p`
      block table  position p of row b lies in slot `block_table[b, p // block_size] * block_size + p % block_size`
    Entries of a block table beyond a row's length are arbitrary valid block numbers and must not influence the result.
    All tensors are int32, or int64 for `slots`, on the kernel's device; the lengths below are host integers.
    """

    query_start: torch.Tensor  # [B + 1]
    seq_lens: torch.Tensor  # [B]
    slots: torch.Tensor  # [T]
    max_query_len: int
    max_seq_len: int
    region_starts: torch.Tensor | None = None  # [B]
    block_table: torch.Tensor | None = None  # [B, blocks]
    block_size: int = 0

    @property
    def num_rows(self) -> int:
        """B."""
        return self.seq_lens.shape[0]

    def slots_of(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots (int64) of `positions` of `rows`: two int64 tensors whose shapes broadcast, by the formula of the layout."""
        if self.region_starts is not None:
            return self.region_starts[rows] + positions
        if self.block_table is not None:
            block = self.block_table[rows, positions // self.block_size].to(torch.int64)
            return block * self.block_size + positions % self.block_size
        raise PluginContractError("AttentionMetadata has neither region_starts nor block_table; one of them must be set")


@dataclass(frozen=True, eq=False)
class Destination:
    """Where the K and V of one step go: token `tokens[i]` into slot `slots[i]`; with `tokens` None, every token in its order."""

    slots: torch.Tensor  # [n], int64, none is -1
    tokens: torch.Tensor | None = None  # [n], int64

    @classmethod
    def of(cls, slots: torch.Tensor) -> Destination:
        """Leave out the tokens of slots [T] that are -1. Reads from the device, so call it once a step, not once a layer."""
        written = slots >= 0
        if bool(written.all()):
            return cls(slots)
        tokens = written.nonzero().squeeze(1)
        return cls(slots.index_select(0, tokens), tokens)

    def store(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [T, ...] into a cache tensor [num_slots, ...] of the same dtype."""
        tensor.index_copy_(0, self.slots, values if self.tokens is None else values.index_select(0, self.tokens))


LayerCache = tuple[torch.Tensor, ...]
"""The cache tensors of one layer, in the order of `Kernel.cache_spec`."""


class Kernel(ABC):
    """Writes K and V into the cache and attends over it. Write first, then always attend over the cache.

    `gathered_bytes` counts what the kernel copied from the cache into a contiguous buffer since it was built; such buffers are bounded, by
    `gather_limit` of the kernels that do it or by one sequence where that is larger. A kernel that reads the cache in place leaves it at 0.
    """

    gathered_bytes: int = 0

    def __init__(self, layers: Sequence[LayerSpec], *, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = tuple(layers)
        self.dtype = dtype
        self.device = device

    def cache_spec(self, layer: LayerSpec) -> tuple[TensorSpec, ...]:
        """The tensors that hold one layer's KV; the first dimension, slots, is left out.

        Sizing, `octavo plan` and transfers follow it. Quantised kernels add scales here.
        """
        return (
            TensorSpec("k", (layer.num_kv_heads, layer.head_size_k), self.dtype),
            TensorSpec("v", (layer.num_kv_heads, layer.head_size_v), self.dtype),
        )

    @abstractmethod
    def prepare(self, meta: AttentionMetadata) -> Any:
        """Whatever all layers of a step share (masks, gather indices), once a step; what a kernel needs for itself lives here."""

    def write(self, cache: LayerCache, k: torch.Tensor, v: torch.Tensor, meta: AttentionMetadata, prepared: Any) -> None:
        """Store k [T, G, Dk] and v [T, G, Dv] at `meta.slots`; a slot of -1 is not written.

        This default asks in each layer whether there is a -1; a kernel that keeps a `Destination` in `prepared` asks once a step.
        """
        destination = Destination.of(meta.slots)
        destination.store(cache[0], k)
        destination.store(cache[1], v)

    @abstractmethod
    def attend(self, q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, prepared: Any, layer: LayerSpec) -> torch.Tensor:
        """q [T, H, Dk] -> [T, H, Dv]: causal attention of each token over its own sequence's cached positions."""

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
        """`write`, then `attend`: what the engine calls in each layer. A kernel that does both in one call overrides it."""
        self.write(cache, k, v, meta, prepared)
        return self.attend(q, cache, meta, prepared, layer)

    def native_calls(self, caches: Sequence[LayerCache], prepared: Any) -> NativeAttention | None:
        """The same for all layers, in the form that ops of the native library take; None: this kernel is not the library's."""
        return None


class StepAttention:
    """What a model calls in each layer of a step (`core.model.Attend`): write, then attend over the cache."""

    def __init__(self, kernel: Kernel, caches: Sequence[LayerCache], meta: AttentionMetadata) -> None:
        self._kernel, self._caches, self._meta = kernel, caches, meta
        self._prepared = kernel.prepare(meta)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `Attend`."""
        kernel = self._kernel
        return kernel.write_and_attend(q, k, v, self._caches[layer], self._meta, self._prepared, kernel.layers[layer])

    def native_calls(self) -> NativeAttention | None:
        """See `Kernel.native_calls`."""
        return self._kernel.native_calls(self._caches, self._prepared)

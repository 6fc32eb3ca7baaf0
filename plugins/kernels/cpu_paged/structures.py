"""What the native attention reads, laid out as in core/native/attention.h. Must not know: plans, the cache."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from octavo.core.attention import AttentionMetadata, LayerSpec
from octavo.core.errors import PluginContractError
from octavo.core.native.library import TYPES


class Layer(ctypes.Structure):
    """`struct AttentionLayer`."""

    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("k_size", c_int64),
        ("v_size", c_int64),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("type", c_int32),
    )

    @classmethod
    def of(cls, spec: LayerSpec, dtype: torch.dtype) -> Layer:
        """The layer; keeps its sinks alive."""
        layer = cls(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            k_size=spec.head_size_k,
            v_size=spec.head_size_v,
            window=spec.window or 0,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            type=TYPES[str(dtype).removeprefix("torch.")],
        )
        if spec.sinks is not None:
            layer.kept = spec.sinks.detach().to(torch.float32).contiguous()
            layer.sinks = layer.kept.data_ptr()
        return layer


class Step(ctypes.Structure):
    """`struct AttentionStep`."""

    _fields_ = (
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("places", c_void_p),
        ("place_stride", c_int64),
        ("rows", c_int64),
        ("tokens", c_int64),
        ("block_size", c_int64),
    )

    @classmethod
    def of(cls, meta: AttentionMetadata) -> Step:
        """The step; keeps its tensors alive. Raises PluginContractError: it has no layout, or is not what `AttentionMetadata` says."""
        places = meta.block_table if meta.region_starts is None else meta.region_starts
        if places is None:
            raise PluginContractError("AttentionMetadata has neither region_starts nor block_table; one of them must be set")
        tensors = {"query_start": meta.query_start, "seq_lens": meta.seq_lens, "places": places}
        for name, tensor in tensors.items():
            if tensor.dtype is not torch.int32 or not tensor.is_cpu:
                raise PluginContractError(f"kernel 'cpu_paged': {name} must be int32 on a CPU, not {tensor.dtype} on {tensor.device}")
            if tensor.numel() and tensor.stride(-1) != 1:
                tensors[name] = tensor.contiguous()
        step = cls(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            place_stride=tensors["places"].stride(0) if meta.region_starts is None else 1,
            rows=meta.num_rows,
            tokens=meta.slots.shape[0],
            block_size=meta.block_size if meta.region_starts is None else 0,
        )
        step.kept = tensors
        return step


class Cache(ctypes.Structure):
    """`struct AttentionCache`."""

    _fields_ = (
        ("k", c_void_p),
        ("k_slot_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v", c_void_p),
        ("v_slot_stride", c_int64),
        ("v_head_stride", c_int64),
    )

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> Cache:
        """Of the cache tensors of a layer, which others keep."""
        return cls(k.data_ptr(), *k.stride()[:2], v.data_ptr(), *v.stride()[:2])


class Plan(ctypes.Structure):
    """`struct AttentionPlan`."""

    _fields_ = (
        ("step", c_void_p),
        ("slots", c_void_p),
        ("items", c_void_p),
        ("merges", c_void_p),
        ("num_items", c_int64),
        ("num_merges", c_int64),
        ("memory", c_void_p),
        ("thread_bytes", c_int64),
        ("threads", c_int32),
    )


class Item(ctypes.Structure):
    """`struct AttentionItem`: only its size is of interest here."""

    _fields_ = (
        *((name, c_int32) for name in ("row", "token", "tokens", "position", "kv_head", "first", "stop", "part")),
        ("record", c_int64),
        ("record_step", c_int64),
    )


class Merge(ctypes.Structure):
    """`struct AttentionMerge`: only its size is of interest here."""

    _fields_ = (*((name, c_int32) for name in ("token", "parts")), ("record", c_int64))

"""Loads the native library and binds its functions.

Pointers go in as integers, from `Tensor.data_ptr()`: the caller keeps the tensors alive and has checked types, shapes and strides, since
nothing is checked on the other side. Must not know: tensors, ops, kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError
from octavo.core.native import presence

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("octavo")

LEVELS = ("plain", "avx2", "avx512", "avx512_bf16", "amx_bf16")  # each needs all that those before it do
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
QUANTIZATIONS = {None: 0, "int8": 1, "int4": 2}


class PackedLinear(ctypes.Structure):
    """A packed weight as `struct Weight` of core/native/gemm.h; addresses of memory that others keep."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("type", c_int32),
        ("groups", c_int32),
        ("quantization", c_int32),
    )


class BlockInputs(ctypes.Structure):
    """What `attention_inputs` is given of a layer, as `struct BlockInputs` of core/native/block.cpp; addresses of what others keep."""

    _fields_ = (
        ("packed", c_void_p),
        ("norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("eps", c_float),
    )


class BlockOutputs(ctypes.Structure):
    """What `attention_outputs` is given of a layer, as `struct BlockOutputs` there."""

    _fields_ = (
        ("out", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
    )


class Block(ctypes.Structure):
    """A layer, as `struct Block` there: addresses of both."""

    _fields_ = (("before", c_void_p), ("after", c_void_p))


class AttentionCall(ctypes.Structure):
    """Attention of a layer in a step, as in core/native/attention.h; addresses of what the kernel `cpu_paged` keeps."""

    _fields_ = (("layer", c_void_p), ("cache", c_void_p), ("plan", c_void_p))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativeAttention:
    """Attention of a step in all layers, for ops that run these in one call of the library."""

    library: Library
    calls: ctypes.Array[AttentionCall]  # in the order of the layers; what they point to lives as long as the step's `prepare`
    tokens: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, int, int, int], ...]  # of each layer: heads, KV heads, head sizes of K and V. One tuple for all steps


# The functions of core/native/*.cpp, in the order of their arguments.
_SIGNATURES: dict[str, list[type]] = {
    "norm": [c_int, c_void_p, *[c_int64] * 5, c_void_p, c_float, c_void_p, *[c_int64] * 2, c_int],
    "rope": [c_int, c_void_p, *[c_int64] * 5, *[c_void_p] * 3, *[c_int64] * 2, c_int],
    "attention_plan": [c_void_p] * 5,
    "attention": [*[c_void_p] * 3, *[c_void_p, c_int64, c_int64] * 3, c_void_p],
    "packed_sizes": [c_int, c_int64, c_int64, c_int, c_void_p, c_void_p],
    "pack": [c_void_p, c_void_p, c_int64, c_int, c_int],
    "rows": [c_void_p, c_void_p, c_int64, c_void_p, c_int],
    "codes_size": [c_int, *[c_int64] * 2, c_int, c_void_p],
    "pack_codes": [*[c_void_p] * 4, c_int, c_int],
    "rows_of_codes": [c_void_p, c_void_p, c_int64, c_void_p, c_int],
    "linear": [c_void_p, c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_void_p, c_int64, c_int],
    "swiglu": [c_void_p, c_void_p, *[c_int64] * 2, c_void_p, c_int],
    "argmax": [c_void_p, c_void_p, *[c_int64] * 2, c_void_p, c_int],
    "attention_inputs": [*[c_void_p] * 2, c_int64, *[c_void_p] * 3, c_int],
    "attention_outputs": [*[c_void_p] * 2, *[c_int64] * 2, c_void_p, c_int],
    "blocks": [*[c_void_p] * 2, c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int],
}


class Library:
    """The functions of one level: `library.norm(...)` is `octavo_norm_<level>` of C. Each returns 0, or 1 where memory ran out."""

    norm: Callable[..., int]
    rope: Callable[..., int]
    attention_plan: Callable[..., int]
    attention: Callable[..., int]
    packed_sizes: Callable[..., int]
    pack: Callable[..., int]
    rows: Callable[..., int]
    codes_size: Callable[..., int]
    pack_codes: Callable[..., int]
    rows_of_codes: Callable[..., int]
    linear: Callable[..., int]
    swiglu: Callable[..., int]
    argmax: Callable[..., int]
    attention_inputs: Callable[..., int]
    attention_outputs: Callable[..., int]
    blocks: Callable[..., int]

    def __init__(self, loaded: ctypes.CDLL, level: str) -> None:
        self.level = level
        self._loaded = loaded
        for name, arguments in _SIGNATURES.items():
            function = getattr(loaded, f"octavo_{name}_{level}", None)
            if function is None:
                raise ConfigError(
                    f"the native library {loaded._name} has no {name}: it was built from other sources. Install Octavo again, so that it "
                    'is built anew, or do without: ops.plugin = "torch", kernel.plugin = "sdpa"'
                )
            function.argtypes, function.restype = arguments, c_int
            setattr(self, name, function)

    @functools.cached_property
    def panel_columns(self) -> int:
        """Columns of a panel of packed weights."""
        size, columns = c_int64(), c_int64()
        self.packed_sizes(TYPES["float32"], 1, 1, 1, ctypes.byref(size), ctypes.byref(columns))
        return columns.value


@functools.cache
def _loaded(path: str) -> ctypes.CDLL:
    import torch  # noqa: F401  (before ours, so that both use one OpenMP)

    try:
        loaded = ctypes.CDLL(path)
        abi = loaded.octavo_abi
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"the native library {path} cannot be loaded: {error}. Build it on this machine (install Octavo again from source), "
            'or do without: ops.plugin = "torch", kernel.plugin = "sdpa"'
        ) from error
    abi.restype = c_int64
    if sources_abi() not in (None, abi()):
        raise ConfigError(
            f"the native library {path} was built from other sources than those in {_SOURCES}: install Octavo again, so that it is built "
            'anew (pip install -e . of a checkout), or do without: ops.plugin = "torch", kernel.plugin = "sdpa"'
        )
    return loaded


_SOURCES = Path(__file__).parent


def sources_abi() -> int | None:
    """The number of the sources beside this file, as setup.py computes it; None: there are none, so they came with their library."""
    sources = sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])
    found = hashlib.sha256()
    for source in sources:
        found.update(source.name.encode() + b"\0" + source.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return int(found.hexdigest()[:15], 16) if sources else None


def levels() -> tuple[str, ...]:
    """The levels that the library has and this processor runs, the best last. Raises ConfigError: the library is not there or is broken."""
    if reason := presence.missing():
        raise ConfigError(f"what was chosen {reason}")
    loaded = _loaded(str(presence.path()))
    return tuple(level for level in _runnable(loaded) if _has(loaded, level))


def _runnable(loaded: ctypes.CDLL) -> tuple[str, ...]:
    """The levels that this processor runs."""
    return tuple(level for level in LEVELS if loaded.octavo_processor_runs(level.encode()) == 1)


def _has(loaded: ctypes.CDLL, level: str) -> bool:
    return hasattr(loaded, f"octavo_norm_{level}")


@functools.cache
def _library(path: str, level: str) -> Library:
    loaded = _loaded(path)
    if lacking := [found for found in _runnable(loaded) if not _has(loaded, found)]:
        logger.warning(
            "the native library has no code for %s, which this processor runs: the compiler that built it did not know it. Install a newer "
            "one, and Octavo again",
            lacking[-1],
        )
    return Library(loaded, level)


def load(level: str | None = None) -> Library:
    """The library at a level: that one, else the one that OCTAVO_NATIVE_LEVEL names, else the best of this processor.

    Raises ConfigError: see `levels`, or the level is unknown or not for this processor.
    """
    found = levels()
    level = level or os.environ.get("OCTAVO_NATIVE_LEVEL") or found[-1]
    if level not in found:
        raise ConfigError(f"native level {level!r} (OCTAVO_NATIVE_LEVEL) cannot be used here; this processor runs {', '.join(found)}")
    return _library(str(presence.path()), level)

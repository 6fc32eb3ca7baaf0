"""Descriptor of the kernel `cpu_paged`. Must not import torch: the implementation in `.kernel` is imported when it is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.core.descriptors import Facts, KernelPlugin, other_kv_dtype
from octavo.core.hookspecs import hookimpl
from octavo.core.native.presence import absence
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.core.attention import Kernel, LayerSpec

DTYPES = ("float32", "bfloat16", "float16")


def _needs(options: PluginOptions, facts: Facts) -> Iterable[str]:
    return ("device:cpu",)


def _rejects(options: PluginOptions, facts: Facts) -> Iterable[str]:
    yield from other_kv_dtype(options, facts)
    if facts.dtype not in DTYPES:
        yield f"computes in {', '.join(DTYPES)}, not in {facts.dtype}"
    if reason := absence():
        yield reason


def _build(options: PluginOptions, layers: tuple[LayerSpec, ...], facts: Facts) -> Kernel:
    import torch

    from octavo.core.native import load
    from octavo.plugins.kernels.cpu_paged.kernel import CpuPagedKernel

    return CpuPagedKernel(layers, dtype=getattr(torch, facts.dtype), device=torch.device(facts.device), library=load())


CPU_PAGED = KernelPlugin(
    name="cpu_paged",
    summary="the native library on a CPU: the cache read in place, contexts split over threads by their length alone",
    provides=frozenset({"contiguous_kv", "paged_kv", "window", "softcap", "sinks"}),
    needs=_needs,
    rejects=_rejects,
    preference=20,
    build=_build,
)


@hookimpl
def octavo_kernels() -> Iterable[KernelPlugin]:
    """The kernel of this package."""
    return [CPU_PAGED]

"""Descriptor of the kernel `naive`. Must not import torch: the implementation in `.kernel` is imported when it is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.core.descriptors import Facts, KernelPlugin, other_kv_dtype
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.core.attention import Kernel, LayerSpec


def _build(options: PluginOptions, layers: tuple[LayerSpec, ...], facts: Facts) -> Kernel:
    import torch

    from octavo.plugins.kernels.naive.kernel import NaiveKernel

    return NaiveKernel(layers, dtype=getattr(torch, facts.dtype), device=torch.device(facts.device))


NAIVE = KernelPlugin(
    name="naive",
    summary="plain torch, one row at a time: written to be read, and to check others by",
    provides=frozenset({"contiguous_kv", "paged_kv", "window", "softcap", "sinks"}),
    rejects=other_kv_dtype,
    preference=0,
    build=_build,
)


@hookimpl
def octavo_kernels() -> Iterable[KernelPlugin]:
    """The kernel of this package."""
    return [NAIVE]

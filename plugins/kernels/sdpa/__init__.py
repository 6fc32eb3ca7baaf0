"""Descriptor and options of the kernel `sdpa`. Must not import torch: the implementation in `.kernel` is imported when it is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from octavo.core.descriptors import Facts, KernelPlugin, other_kv_dtype
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.core.attention import Kernel, LayerSpec


class SdpaOptions(PluginOptions):
    """Options of the kernel `sdpa`."""

    gather_limit: int = Field(
        32 * 2**20, ge=1, description="most bytes of K and V copied together for decoding rows; a single row is copied whole even above it"
    )


def _build(options: SdpaOptions, layers: tuple[LayerSpec, ...], facts: Facts) -> Kernel:
    import torch

    from octavo.plugins.kernels.sdpa.kernel import SdpaKernel

    return SdpaKernel(layers, dtype=getattr(torch, facts.dtype), device=torch.device(facts.device), gather_limit=options.gather_limit)


SDPA = KernelPlugin(
    name="sdpa",
    summary="torch's scaled_dot_product_attention; decoding rows are gathered and attended together",
    options=SdpaOptions,
    provides=frozenset({"contiguous_kv", "paged_kv", "window"}),  # SDPA has neither soft-cap nor sinks
    rejects=other_kv_dtype,
    preference=10,
    build=_build,
)


@hookimpl
def octavo_kernels() -> Iterable[KernelPlugin]:
    """The kernel of this package."""
    return [SDPA]

"""Descriptor and options of the kernel `triton_paged`. Must not import torch or triton: `.kernel` is imported when it is built."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import Field

from octavo.core.descriptors import Facts, KernelPlugin, other_kv_dtype
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.core.attention import Kernel, LayerSpec

OLDEST_CAPABILITY = (8, 0)  # Triton compiles bf16 for these CUDA devices and newer ones
MAX_HEAD_SIZE = 256


class TritonPagedOptions(PluginOptions):
    """Options of the kernel `triton_paged`."""

    interpret: bool = Field(
        False,
        description="run on a CPU in Triton's interpreter, which is very slow: for tests and learning; needs TRITON_INTERPRET=1, too",
    )


def _needs(options: TritonPagedOptions, facts: Facts) -> Iterable[str]:
    return () if options.interpret else ("device:cuda",)  # what torch calls AMD's GPUs, too


def _rejects(options: TritonPagedOptions, facts: Facts) -> Iterable[str]:
    yield from other_kv_dtype(options, facts)
    if facts.capability is not None and facts.capability < OLDEST_CAPABILITY:
        wanted, found = (".".join(map(str, capability)) for capability in (OLDEST_CAPABILITY, facts.capability))
        yield f"Triton needs a GPU of compute capability {wanted} or newer, this one has {found}"
    if (size := max(facts.head_size_k, facts.head_size_v)) > MAX_HEAD_SIZE:
        yield f"kernel 'triton_paged' has heads of up to {MAX_HEAD_SIZE} elements, the model's have {size}"
    if find_spec("triton") is None:
        yield "Triton is not installed; it exists for Linux only: pip install triton"


def _build(options: TritonPagedOptions, layers: tuple[LayerSpec, ...], facts: Facts) -> Kernel:
    import torch

    from octavo.plugins.kernels.triton_paged.kernel import TritonPagedKernel

    return TritonPagedKernel(layers, dtype=getattr(torch, facts.dtype), device=torch.device(facts.device), interpret=options.interpret)


TRITON_PAGED = KernelPlugin(
    name="triton_paged",
    summary="Triton on a GPU: one launch a layer for any mix of prompts and decoding rows, the cache read in place",
    options=TritonPagedOptions,
    provides=frozenset({"contiguous_kv", "paged_kv", "window", "softcap", "sinks"}),
    needs=_needs,
    rejects=_rejects,
    preference=20,
    build=_build,
)


@hookimpl
def octavo_kernels() -> Iterable[KernelPlugin]:
    """The kernel of this package."""
    return [TRITON_PAGED]

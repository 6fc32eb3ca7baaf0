"""Ops `cpu`: linears, norms, RoPE and activations of the native library. Must not import torch: `.ops` is imported when it is built."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.core.descriptors import Facts, OpsPlugin
from octavo.core.hookspecs import hookimpl
from octavo.core.native.presence import absence
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.core.model import Ops

DTYPES = ("float32", "bfloat16", "float16")


class CpuOpsOptions(PluginOptions):
    """No options."""


def _needs(options: CpuOpsOptions, facts: Facts) -> Iterable[str]:
    return ("device:cpu",)


def _rejects(options: CpuOpsOptions, facts: Facts) -> Iterable[str]:
    if reason := absence():
        yield reason
    if facts.dtype not in DTYPES:
        yield f"computes in {', '.join(DTYPES)}, not in {facts.dtype}"


def _avoids(options: CpuOpsOptions, facts: Facts) -> Iterable[str]:
    """Without vectors of 256 bits torch's linears (MKL, oneDNN, Arm's Compute Library) are faster: see ADR 12."""
    if "torch" in sys.modules and absence() is None:
        from octavo.core.native import load

        if load().level == "plain":
            yield "the native library has no code for this processor's vectors (level plain), and torch's linears are faster"


def _build(options: CpuOpsOptions, facts: Facts) -> Ops:
    import torch

    from octavo.core.native import load
    from octavo.plugins.ops.cpu.ops import CpuOps

    return CpuOps(load(), getattr(torch, facts.dtype))


CPU = OpsPlugin(
    name="cpu",
    summary="packed weights and fused blocks of the native library, on a CPU",
    options=CpuOpsOptions,
    needs=_needs,
    provides=frozenset({"weights:int8", "weights:int4"}),
    rejects=_rejects,
    avoids=_avoids,
    preference=10,
    build=_build,
)


@hookimpl
def octavo_ops() -> list[OpsPlugin]:
    """The one set of ops of this package."""
    return [CPU]

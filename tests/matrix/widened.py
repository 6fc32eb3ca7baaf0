"""Ops for tests in 16 bits: torch's, but for linears that are computed in fp32 and rounded once.

That is what a linear in 16 bits is: products and sums in fp32, one rounding at the end. torch's own is the same. On a processor with AVX2
and no instructions for bf16 it takes as long for one row of SmolLM2-135M, twice as long for 8 and four times as long for 64. Weights are
held in fp32, of the values that they have in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from octavo.core.descriptors import Facts
from octavo.core.model import Ops
from octavo.core.sampler import most_likely
from octavo.plugins.ops.torch_ops import TORCH
from octavo.plugins.ops.torch_ops.ops import Linear, TorchOps


class WidenedOps(TorchOps):
    """For x in `dtype`; `Ops` says what each method does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def pack(self, *given: Any, **options: Any) -> Linear:
        return _widened(super().pack(*given, **options))

    def pack_gate_up(self, *given: Any, **options: Any) -> Linear:
        return _widened(super().pack_gate_up(*given, **options))

    def rows(self, packed: Linear, ids: torch.Tensor) -> torch.Tensor:
        return super().rows(packed, ids).to(self.dtype)

    def linear(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        return F.linear(x.float(), packed.weight, packed.bias).to(self.dtype)

    def linear_add(self, x: torch.Tensor, packed: Linear, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.linear(x, packed))

    def swiglu(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        gate, up = self.linear(x, packed).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def argmax(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        return most_likely(self.linear(x, packed))


def _widened(packed: Linear) -> Linear:
    return Linear(packed.weight.float(), None if packed.bias is None else packed.bias.float())


def _build(options: Any, facts: Facts) -> Ops:
    return WidenedOps(getattr(torch, facts.dtype))


WIDENED = replace(TORCH, name="widened", build=_build)

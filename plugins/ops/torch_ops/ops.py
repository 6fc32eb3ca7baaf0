"""The operations of a layer in torch. A packed weight is the weight as it came and its bias: nothing is copied but gate and up, joined.

Quantised weights are dequantised when they are packed: the same numbers as other ops have, in the memory and time of whole weights.
Must not know: models, attention, devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from octavo.core.model import Ops
from octavo.core.quantization import Quantization, quantize
from octavo.core.sampler import most_likely


class Linear(NamedTuple):
    """A packed linear."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]


class TorchOps(Ops):
    """See `octavo.core.model.Ops`."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, quantization: Quantization | None = None) -> Linear:
        return Linear(_quantized(weight, quantization), bias)

    def pack_gate_up(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        quantization: Quantization | None = None,
    ) -> Linear:
        bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
        return Linear(_quantized(torch.cat([gate, up]), quantization), bias)

    def packed_bytes(self, packed: Linear) -> int:
        return sum(tensor.nbytes for tensor in packed if tensor is not None)

    def rows(self, packed: Linear, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, packed.weight)

    def linear(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        return F.linear(x, packed.weight, packed.bias)

    def linear_add(self, x: torch.Tensor, packed: Linear, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(F.linear(x, packed.weight, packed.bias))

    def swiglu(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        gate, up = F.linear(x, packed.weight, packed.bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for all heads
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def argmax(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        return most_likely(F.linear(x, packed.weight, packed.bias))


def _quantized(weight: torch.Tensor, quantization: Quantization | None) -> torch.Tensor:
    return weight if quantization is None else quantize(weight, quantization).dequantized(weight.dtype)

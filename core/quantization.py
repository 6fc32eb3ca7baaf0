"""Weights of 8 or 4 bits: what a matrix becomes, so that every set of ops computes with the same numbers.

int8: one scale a row, codes -127 to 127. int4: rows are cut into groups of 32, each with a scale and a minimum in fp16, codes 0 to 15; this
is GGUF's Q4_1, whose codes come back out of weights that were dequantised (docs/adr/0013-weight-only-quantization.md).
Activations stay as they are. Must not know: how ops lay codes out, models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from octavo.core.errors import ModelSourceError

Quantization = Literal["int8", "int4"]
GROUP = 32  # of int4
_PIECE = 1 << 20  # weights quantised at a time: intermediate results are in fp32


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A matrix [n, k] as scale * code + minimum."""

    kind: Quantization
    codes: torch.Tensor  # [n, k], int8 or (int4) uint8
    scales: torch.Tensor  # fp32 [n, 1], or [n, groups] of values that fp16 holds
    minima: torch.Tensor | None  # as the scales of int4

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[n, k] in `dtype`, computed in fp32 and rounded once."""
        if self.minima is None:
            return (self.codes * self.scales).to(dtype)
        k = self.codes.shape[1]
        scales, minima = (tensor.repeat_interleave(GROUP, dim=1)[:, :k] for tensor in (self.scales, self.minima))
        return torch.addcmul(minima, self.codes.float(), scales).to(dtype)


def quantize(weight: torch.Tensor, kind: Quantization) -> QuantizedWeight:
    """The nearest codes of a weight [n, k]. Raises ModelSourceError: it holds NaN, infinity or (int4) values beyond fp16."""
    of_rows: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = {"int8": _int8, "int4": _int4}[kind]
    pieces = weight.split(max(1, _PIECE // weight.shape[1]))
    codes, scales, *minima = (torch.cat(parts) for parts in zip(*(of_rows(piece.float()) for piece in pieces), strict=True))
    if not all(bool(tensor.isfinite().all()) for tensor in (scales, *minima)):
        limit = "" if kind == "int8" else ", or beyond the 65504 of fp16"
        raise ModelSourceError(
            f"a weight {list(weight.shape)} cannot be held in {kind}: it has values that are not finite{limit}. Load the model without "
            "quantization"
        )
    return QuantizedWeight(kind=kind, codes=codes, scales=scales, minima=minima[0] if minima else None)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return _codes(weight, scales).to(torch.int8), scales


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """From each group's extremes; then the scale and minimum that suit those codes best (least squares), and the codes nearest to these."""
    n, k = weight.shape
    padded = F.pad(weight[None], (0, -k % GROUP), mode="replicate")[0]
    groups = padded.view(n, -1, GROUP)
    minima = groups.amin(dim=2, keepdim=True)
    scales = _fp16((groups.amax(dim=2, keepdim=True) - minima) / 15)
    codes = _codes(groups - minima, scales).clamp_(0, 15)
    centred, mean = codes - codes.mean(dim=2, keepdim=True), groups.mean(dim=2, keepdim=True)
    spread = centred.square().sum(dim=2, keepdim=True)
    fitted = (centred * groups).sum(dim=2, keepdim=True) / spread
    scales = torch.where(spread > 0, _fp16(fitted), scales)
    minima = torch.where(spread > 0, _fp16(mean - scales * codes.mean(dim=2, keepdim=True)), _fp16(minima))
    codes = _codes(groups - minima, scales).clamp_(0, 15)
    return codes.to(torch.uint8).view(n, -1)[:, :k], scales[..., 0], minima[..., 0]


def _codes(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Nearest whole numbers of scales; 0 where a scale is 0."""
    return torch.where(scales > 0, values / scales, 0).round_()


def _fp16(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()

"""`fetch`: what a step left on the device comes to the host in one transfer, so that the host waits once, however much it asked for.

Must not know: what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch


def fetch(tensors: Seq[torch.Tensor]) -> list[torch.Tensor]:
    """int64 and fp32 tensors of one device, as they are, on the host; fp32 travels as its bits."""
    if len(tensors) < 2:
        return [tensor.cpu() for tensor in tensors]
    words = torch.cat([_words(tensor) for tensor in tensors]).cpu()
    parts = words.split([tensor.numel() for tensor in tensors])
    return [_like(tensor, part).view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat if tensor.dtype == torch.int64 else flat.view(torch.int32).long()


def _like(tensor: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return words if tensor.dtype == torch.int64 else words.int().view(tensor.dtype)

"""Frequencies of rotary position embeddings (Su et al. 2021), and the ways in which checkpoints stretch them to longer contexts.

The arithmetic follows transformers' `modeling_rope_utils` step by step, in fp32, so that fp32 logits agree. Must not know: models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


class Rope:
    """cos and sin of the rotation angles, computed once a step for the positions of that step."""

    def __init__(self, parameters: Mapping[str, Any], head_size: int, device: torch.device) -> None:
        """`parameters` as `LlamaConfig.rope` holds them."""
        frequencies, self.magnitude = _frequencies(parameters, head_size)
        self.frequencies = frequencies.to(device)  # [head_size / 2]

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos, sin [T, head_size / 2] in fp32."""
        angles = positions.unsqueeze(1).float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.magnitude == 1.0 else (cos.mul_(self.magnitude), sin.mul_(self.magnitude))


def _frequencies(rope: Mapping[str, Any], head_size: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dimensions, and the factor on cos and sin."""
    wavelengths: torch.Tensor = rope["rope_theta"] ** (torch.arange(0, head_size, 2, dtype=torch.float) / head_size)  # divided by 2 pi
    match rope["rope_type"]:
        case "linear":  # position interpolation (Chen et al. 2023)
            return 1.0 / wavelengths / rope["factor"], 1.0
        case "llama3":
            return _llama3(1.0 / wavelengths, rope), 1.0
        case "yarn":
            return _yarn(wavelengths, rope), _yarn_magnitude(rope)
        case _:
            return 1.0 / wavelengths, 1.0


def _llama3(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, those between interpolated."""
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / frequencies)  # in the context of pretraining
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    mixed: torch.Tensor = (1 - fast) * frequencies / rope["factor"] + fast * frequencies
    return mixed


def _yarn(wavelengths: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (Peng et al. 2023), section 3.2: a ramp over the dimensions between interpolation and none."""
    size, theta, context = 2 * len(wavelengths), rope["rope_theta"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The dimension whose pair makes so many turns in the context of pretraining."""
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return wavelengths.mul(rope["factor"]).reciprocal() * (1 - kept) + wavelengths.reciprocal() * kept


def _yarn_magnitude(rope: Mapping[str, Any]) -> float:
    """The attention temperature of YaRN, section 3.4, applied to q and k alike; DeepSeek gives it by two mscales."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def scale(mscale: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * mscale * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)

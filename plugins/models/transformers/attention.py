"""The two attention functions that the library is told of: one for steps, one for the probe.

The `Attend` of a step travels as the keyword argument `octavo_attend` of the model's forward, which hands it down to each layer's
attention: nothing global, so that models and threads do not meet. Importing this file registers both names, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from octavo.core.model import Attend
from octavo.plugins.models.transformers.config import Unsupported

STEP = "octavo"
PROBE = "octavo_probe"


class Watch(Protocol):
    """What the probe gives instead of an `Attend`: it sees everything that a layer hands to its attention."""

    def see(self, module: torch.nn.Module, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """q [1, H, T, Dk], k [1, G, T, Dk], v [1, G, T, Dv] -> [1, T, H, Dv]."""


def _step_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, octavo_attend: Attend, **__: Any
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, Dk], key [1, G, T, Dk], value [1, G, T, Dv] -> [1, T, H, Dv]. Scale, window and so on are in the LayerSpecs.

    GPT-J rotates in fp32: the cache has the type of the values.
    """
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    return octavo_attend(module.layer_idx, q, k, v).contiguous().unsqueeze(0), None  # some models take a view of it


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    octavo_attend: Watch | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    if octavo_attend is None:
        raise Unsupported("it does not hand keyword arguments on to its attention")
    seen = octavo_attend.see(module, q=query, k=key, v=value, arguments={"attention_mask": attention_mask, **arguments})
    return seen, None


def _probe_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: torch.device, **_: Any) -> torch.Tensor:
    """A mask [1, 1, T, T] that says which function it stands for; whatever a model makes of it no longer says so."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.octavo_function = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(STEP, _step_attention)
AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)  # none for STEP: then the library builds no masks

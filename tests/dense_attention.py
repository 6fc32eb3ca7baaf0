"""The plainest attention that can serve a model: fp32, one sequence, a dense cache. With ways to be wrong, to see whether tests notice.

Not a kernel: it knows no slots and no block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from octavo.core.attention import LayerSpec
from octavo.core.model import Model


@dataclass
class DenseAttention:
    """An `Attend` for one sequence, called with its tokens in order, in pieces of any length.

    The faults: `only_self` (the context is ignored), `dropped` (position whose K and V are lost), `swap_kv_heads` (queries read the
    heads in reverse order), `no_window`, `no_softcap`, `no_sinks`.
    """

    layers: Sequence[LayerSpec]
    only_self: bool = False
    dropped: int | None = None
    swap_kv_heads: bool = False
    no_window: bool = False
    no_softcap: bool = False
    no_sinks: bool = False
    k: dict[int, torch.Tensor] = field(default_factory=dict)
    v: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, Dk], k [T, G, Dk], v [T, G, Dv] -> [T, H, Dv]."""
        spec = self.layers[layer]
        self.k[layer] = k = torch.cat([self.k[layer], k.float()]) if layer in self.k else k.float().clone()
        self.v[layer] = v = torch.cat([self.v[layer], v.float()]) if layer in self.v else v.float().clone()
        if self.swap_kv_heads:
            k, v = k.flip(1), v.flip(1)
        k, v = k.repeat_interleave(spec.group, 1), v.repeat_interleave(spec.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
        if spec.softcap is not None and not self.no_softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~self.visible(len(q), len(k), spec), -torch.inf)
        if spec.sinks is not None and not self.no_sinks:
            scores = torch.cat([scores, spec.sinks.float()[:, None, None].expand(-1, len(q), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    def visible(self, num_queries: int, num_keys: int, spec: LayerSpec) -> torch.Tensor:
        """Which keys each of the last `num_queries` positions sees: bool [queries, keys]."""
        i = torch.arange(num_keys - num_queries, num_keys)[:, None]
        j = torch.arange(num_keys)[None, :]
        seen = j <= i
        if spec.window is not None and not self.no_window:
            seen &= j > i - spec.window
        if self.only_self:
            seen &= j == i
        if self.dropped is not None:
            seen &= (j != self.dropped) | (j == i)
        return seen


def greedy(
    model: Model, prompt: Sequence[int], max_tokens: int, *, attend: DenseAttention, piece: int | None = None, shift_from: int | None = None
) -> list[int]:
    """Greedy continuation, the prompt computed whole or in pieces of `piece` tokens.

    With `shift_from`, another fault: positions from there on are one too large (RoPE is relative: shifting all would change nothing).
    """
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + max_tokens:
        stop = min(len(tokens), done + (piece or len(tokens)))
        positions = torch.arange(done, stop)
        if shift_from is not None:
            positions = positions + (positions >= shift_from)
        ids = torch.tensor(tokens[done:stop])
        last = torch.tensor([len(ids) - 1] if stop == len(tokens) else [], dtype=torch.int64)
        best = model.argmax(model.forward(ids, positions, attend, rows=last))
        done = stop
        tokens += best.tolist()
    return tokens[len(prompt) :]

"""Attention in plain torch, one row at a time, with fp32 scores. Every feature of `LayerSpec`, both layouts, any device.

Copies one row's K and V at a time, so the copy is bounded by the longest row; a row's scores [H, n, L] exist in full.
Must not know: how tokens came to their slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.attention import AttentionMetadata, Destination, Kernel, LayerCache, LayerSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """One sequence of the step, for layers of one window."""

    tokens: slice  # its n queries in the flattened batch
    slots: torch.Tensor  # [L], from the first position that any of the queries sees
    hidden: torch.Tensor  # [n, L], True where a query must not look


@dataclass(frozen=True, eq=False)
class _Step:
    destination: Destination
    rows: dict[int | None, list[_Row]]  # by window


class NaiveKernel(Kernel):
    """The definition of attention, row by row."""

    def prepare(self, meta: AttentionMetadata) -> _Step:
        """Slots and masks of each row, once for each distinct window."""
        bounds, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
        rows: dict[int | None, list[_Row]] = {layer.window: [] for layer in self.layers}
        for row, length in enumerate(lengths):
            tokens = slice(bounds[row], bounds[row + 1])
            start = length - (tokens.stop - tokens.start)
            if length in (0, start):  # padding, or nothing to do
                continue
            queries = torch.arange(start, length, device=self.device)[:, None]
            for window, windowed in rows.items():
                first = 0 if window is None else max(0, start - window + 1)
                keys = torch.arange(first, length, device=self.device)
                hidden = keys > queries
                if window is not None:
                    hidden |= keys <= queries - window
                slots = meta.slots_of(torch.full_like(keys, row), keys)
                windowed.append(_Row(tokens=tokens, slots=slots, hidden=hidden))
        return _Step(Destination.of(meta.slots), rows)

    def write(self, cache: LayerCache, k: torch.Tensor, v: torch.Tensor, meta: AttentionMetadata, prepared: Any) -> None:
        """As `Kernel.write`, without asking the device in each layer."""
        prepared.destination.store(cache[0], k)
        prepared.destination.store(cache[1], v)

    def attend(self, q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, prepared: Any, layer: LayerSpec) -> torch.Tensor:
        """q [T, H, Dk] -> [T, H, Dv] in q's dtype; tokens of empty rows get zeros."""
        output = q.new_zeros(q.shape[0], layer.num_heads, layer.head_size_v)
        for row in prepared.rows[layer.window]:
            k = cache[0].index_select(0, row.slots)  # [L, G, Dk]
            v = cache[1].index_select(0, row.slots)  # [L, G, Dv]
            self.gathered_bytes += k.nbytes + v.nbytes
            output[row.tokens] = _attend_row(q[row.tokens], k, v, row.hidden, layer)
        return output


def _attend_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """q [n, H, Dk], k [L, G, Dk], v [L, G, Dv], hidden [n, L] -> [n, H, Dv] in fp32. Below, r counts the query heads of a KV head."""
    queries = q.float().view(-1, layer.num_kv_heads, layer.group, layer.head_size_k)
    scores = torch.einsum("ngrd,lgd->grnl", queries, k.float()) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.to(scores).view(layer.num_kv_heads, layer.group, 1, 1)
        scores = torch.cat([scores, sinks.expand(-1, -1, q.shape[0], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("grnl,lgd->ngrd", weights, v.float()).flatten(1, 2)

"""Attention straight from its definition, in fp32 or fp64: what kernels are compared with, not one of them.

One loop over rows and one over KV heads, nothing shared with a kernel but the mapping of positions to slots (`AttentionMetadata.slots_of`).
Must not know: any kernel, how tokens came to their slots.
"""

from __future__ import annotations

import torch

from octavo.core.attention import AttentionMetadata, LayerCache, LayerSpec


def visible_keys(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which key positions [L] each query position [n] sees, bool [n, L]: itself and what precedes it, no more than `window` in all."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def reference_attention(
    q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, layer: LayerSpec, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """q [T, H, Dk], cache k [S, G, Dk] and v [S, G, Dv] with this step's tokens written -> [T, H, Dv], computed and returned in `dtype`.

    softmax(q k^T scale) v as in "Attention Is All You Need" (Vaswani et al., 2017), causal; query head h reads KV head h // group.
    Tokens of empty rows get zeros.
    """
    output = torch.zeros(q.shape[0], layer.num_heads, layer.head_size_v, dtype=dtype, device=q.device)
    for row, length in enumerate(meta.seq_lens.tolist()):
        if length == 0:
            continue
        begin, end = meta.query_start[row : row + 2].tolist()
        positions = torch.arange(length, device=q.device)
        slots = meta.slots_of(torch.full_like(positions, row), positions)
        seen = visible_keys(positions[length - (end - begin) :], positions, layer.window)
        for kv_head in range(layer.num_kv_heads):
            heads = slice(kv_head * layer.group, (kv_head + 1) * layer.group)
            k = cache[0][slots, kv_head].to(dtype)
            v = cache[1][slots, kv_head].to(dtype)
            scores = q[begin:end, heads].to(dtype) @ k.T * layer.scale  # [n, group, L]
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
            if layer.sinks is not None:
                sinks = layer.sinks[heads].to(dtype)[None, :, None].expand(end - begin, -1, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            output[begin:end, heads] = scores.softmax(-1)[..., :length] @ v
    return output

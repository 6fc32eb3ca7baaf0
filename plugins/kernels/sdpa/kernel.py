"""Attention by `torch.nn.functional.scaled_dot_product_attention`, for both layouts and any device.

Rows with one query (decoding) share calls: their K and V are gathered into [B, L, G, D], padded to the longest. A row with more queries
has calls of its own. Where the slots of a lone row follow each other, nothing is copied. Query heads that share a KV head are laid out so
that K and V are never repeated. Positions outside a window are not even read. Must not know: how tokens came to their slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from octavo.core.attention import AttentionMetadata, Destination, Kernel, LayerCache, LayerSpec
from octavo.core.errors import IncompatibleStackError

# A call costs about as much as gathering some hundred positions, so padding up to that is cheaper than another call.
_FREE_PADDING = 256
_PADDING_SHARE = 0.25
# A masked call has this many queries at most: bounds the mask, and with a window skips the keys that none of them sees.
_MASKED_QUERIES = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """One sequence of the step, on the host: queries `tokens` of the flattened batch, the last ones of `length` positions."""

    index: int
    tokens: slice
    length: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """One call of SDPA: `rows` rows of one query each and L keys each, or (`rows` is 0) several queries of one row."""

    rows: int
    tokens: slice | torch.Tensor  # the queries in the flattened batch
    slots: slice | torch.Tensor  # of the keys, [rows * L] or [L]; a slice is read in place
    mask: torch.Tensor | None = None  # added to the scores
    is_causal: bool = False


@dataclass(frozen=True, eq=False)
class _Step:
    destination: Destination
    calls: dict[int | None, list[_Call]]  # by window


class SdpaKernel(Kernel):
    """torch's fused attention. `gather_limit`: bytes of K and V that decoding rows may copy together."""

    def __init__(self, layers: Sequence[LayerSpec], *, dtype: torch.dtype, device: torch.device, gather_limit: int) -> None:
        """Raises IncompatibleStackError for layers with a soft-cap or sinks."""
        super().__init__(layers, dtype=dtype, device=device)
        for layer in self.layers:
            if layer.softcap is not None or layer.sinks is not None:
                feature = "a soft-cap" if layer.softcap is not None else "sinks"
                raise IncompatibleStackError(
                    f"kernel 'sdpa' cannot compute {feature}, which layer {layer.index} has; use kernel = \"naive\""
                )
        widest: dict[int | None, int] = {}  # bytes of a position, by window
        for layer in self.layers:
            size = sum(spec.bytes_per_slot for spec in self.cache_spec(layer))
            widest[layer.window] = max(size, widest.get(layer.window, 0))
        self._limits = {window: gather_limit // size for window, size in widest.items()}  # positions that may be gathered together

    def prepare(self, meta: AttentionMetadata) -> _Step:
        """The calls of each distinct window, with their gather indices and masks."""
        bounds, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
        rows = [_Row(index=i, tokens=slice(bounds[i], bounds[i + 1]), length=length) for i, length in enumerate(lengths) if length > 0]
        decoding = [row for row in rows if row.tokens.stop - row.tokens.start == 1]
        others = [row for row in rows if row.tokens.stop - row.tokens.start > 1]
        calls: dict[int | None, list[_Call]] = {}
        for window, limit in self._limits.items():
            calls[window] = [self._decode_call(meta, group, window) for group in _groups(decoding, window, limit)]
            for row in others:
                calls[window].extend(self._row_calls(meta, row, window))
        return _Step(Destination.of(meta.slots), calls)

    def write(self, cache: LayerCache, k: torch.Tensor, v: torch.Tensor, meta: AttentionMetadata, prepared: Any) -> None:
        """As `Kernel.write`, without asking the device in each layer."""
        prepared.destination.store(cache[0], k)
        prepared.destination.store(cache[1], v)

    def attend(self, q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, prepared: Any, layer: LayerSpec) -> torch.Tensor:
        """q [T, H, Dk] -> [T, H, Dv] in q's dtype; tokens of empty rows get zeros."""
        output = q.new_zeros(q.shape[0], layer.num_heads, layer.head_size_v)
        for call in prepared.calls[layer.window]:
            queries = q[call.tokens].view(-1, layer.num_kv_heads, layer.group, layer.head_size_k)  # [n, G, r, D], r heads a KV head
            k, v = self._read(cache[0], call.slots), self._read(cache[1], call.slots)
            if call.rows:  # the r heads stand where queries usually do: [B, G, r, D] over [B, G, L, D]
                k, v = (tensor.view(call.rows, -1, *tensor.shape[1:]).transpose(1, 2) for tensor in (k, v))
            else:  # KV heads stand where the batch usually does: [G, r, n, D] over [G, r, L, D] whose r is a view
                queries = queries.permute(1, 2, 0, 3)
                k, v = (tensor.transpose(0, 1).unsqueeze(1).expand(-1, layer.group, -1, -1) for tensor in (k, v))
            result = F.scaled_dot_product_attention(queries, k, v, attn_mask=call.mask, is_causal=call.is_causal, scale=layer.scale)
            output[call.tokens] = (result if call.rows else result.permute(2, 0, 1, 3)).flatten(1, 2)
        return output

    def _read(self, tensor: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
        """The slots of a cache tensor: a view, or a counted copy."""
        if isinstance(slots, slice):
            return tensor[slots]
        copy = tensor.index_select(0, slots)
        self.gathered_bytes += copy.nbytes
        return copy

    def _slots(self, meta: AttentionMetadata, row: _Row, *, first: int, stop: int) -> slice | torch.Tensor:
        """Where positions first to stop - 1 of a row lie; a slice if they follow each other."""
        positions = torch.arange(first, stop, device=self.device)
        slots = meta.slots_of(torch.full_like(positions, row.index), positions)
        begin = int(slots[0])
        in_place = torch.equal(slots, positions + (begin - first))
        return slice(begin, begin + stop - first) if in_place else slots

    def _decode_call(self, meta: AttentionMetadata, group: list[_Row], window: int | None) -> _Call:
        """One call for rows of one query each.

        Shorter rows are padded with their own last position, masked: it is written, so that no NaN is multiplied by the weight 0.
        """
        if len(group) == 1:
            row = group[0]
            return _Call(rows=1, tokens=row.tokens, slots=self._slots(meta, row, first=row.length - _span(row, window), stop=row.length))
        spans = torch.tensor([_span(row, window) for row in group], device=self.device)[:, None]
        last = torch.tensor([row.length - 1 for row in group], device=self.device)[:, None]
        offsets = torch.arange(max(_span(row, window) for row in group), device=self.device)
        positions = torch.minimum(last - spans + 1 + offsets, last)  # [B, L]
        indices = torch.tensor([row.index for row in group], device=self.device)[:, None]
        padding = offsets >= spans
        mask = None
        if len({_span(row, window) for row in group}) > 1:
            mask = torch.zeros(padding.shape, dtype=self.dtype, device=self.device).masked_fill_(padding, -torch.inf)[:, None, None, :]
        tokens = torch.tensor([row.tokens.start for row in group])
        begin = int(tokens[0])
        adjacent = torch.equal(tokens, torch.arange(begin, begin + len(group)))
        return _Call(
            rows=len(group),
            tokens=slice(begin, begin + len(group)) if adjacent else tokens.to(self.device),
            slots=meta.slots_of(indices, positions).flatten(),
            mask=mask,
        )

    def _row_calls(self, meta: AttentionMetadata, row: _Row, window: int | None) -> Iterator[_Call]:
        """The calls of a row with several queries: one without a mask as far as plain causality holds, then masked ones."""
        position = row.length - (row.tokens.stop - row.tokens.start)
        token = row.tokens.start - position  # of position 0
        if position == 0:
            position = row.length if window is None else min(row.length, window)
            yield _Call(rows=0, tokens=slice(token, token + position), slots=self._slots(meta, row, first=0, stop=position), is_causal=True)
        for start in range(position, row.length, _MASKED_QUERIES):
            stop = min(start + _MASKED_QUERIES, row.length)
            first = 0 if window is None else max(0, start - window + 1)
            queries = torch.arange(start, stop, device=self.device)[:, None]
            keys = torch.arange(first, stop, device=self.device)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            yield _Call(rows=0, tokens=slice(token + start, token + stop), slots=self._slots(meta, row, first=first, stop=stop), mask=mask)


def _span(row: _Row, window: int | None) -> int:
    """Positions that the row's last query sees."""
    return row.length if window is None else min(row.length, window)


def _groups(rows: list[_Row], window: int | None, limit: int) -> Iterator[list[_Row]]:
    """Split decoding rows into groups of similar length, of at most `limit` positions each, padding counted; a lone row may have more."""
    group: list[_Row] = []
    longest = filled = 0
    for row in sorted(rows, key=lambda row: _span(row, window), reverse=True):
        span = _span(row, window)
        padded = longest * (len(group) + 1)
        if group and (padded > limit or padded - filled - span > max(_FREE_PADDING, _PADDING_SHARE * padded)):
            yield sorted(group, key=lambda row: row.index)
            group, filled = [], 0
        if not group:
            longest = span
        group.append(row)
        filled += span
    if group:
        yield sorted(group, key=lambda row: row.index)

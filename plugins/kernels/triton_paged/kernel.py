"""Launches the functions of `.attention_jit`: chooses tiles, checks layouts, lays out arguments.

One launch a layer writes, one attends, whatever the mix of prompts, chunks and decoding rows; nothing is gathered, nothing is read back
from the device. The grid follows from the number of tokens and of rows alone, so a captured graph may be replayed with any lengths.
Must not know: how tokens came to their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from octavo.core.attention import AttentionMetadata, Kernel, LayerCache, LayerSpec
from octavo.core.errors import ConfigError, IncompatibleStackError, PluginContractError
from octavo.plugins.kernels.triton_paged import MAX_HEAD_SIZE
from octavo.plugins.kernels.triton_paged.attention_jit import attend_tiles, write_slots

_WRITTEN_ELEMENTS = 4096  # of K or V, that one program copies
_IMPORTED_TO_INTERPRET = isinstance(attend_tiles, InterpretedFunction)
COMPILER_OPTIONS = {"enable_fp_fusion": True}  # multiply and add in one instruction; Triton's default is about to change


class Tile(NamedTuple):
    """What a program works on: `rows` pairs of query and head, `keys` at a time, by `num_warps` with `num_stages` loads in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By bytes of an element and head size up to which: for steps in which no row has more than one query, and for others. The largest of
# which no register is spilled on cuda:80, cuda:90 and gfx942, and which fits 64 KiB of shared memory where the GPU has no more.
_TILES = {
    (2, 64): (Tile(16, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 128): (Tile(16, 64, 4, 3), Tile(64, 32, 4, 2)),
    (2, 256): (Tile(16, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 64): (Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
    (4, 128): (Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
    (4, 256): (Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
}
# An interpreted operation costs about the same whatever its size.
_INTERPRETED = Tile(64, 64, 1, 1)


def tile_for(layer: LayerSpec, dtype: torch.dtype, *, decoding: bool, interpret: bool = False) -> Tile:
    """The tile for a layer in a step; `decoding`: no row of the step has more than one query.

    Raises IncompatibleStackError for heads that are too large.
    """
    size = max(layer.head_size_k, layer.head_size_v)
    if size > MAX_HEAD_SIZE:
        raise IncompatibleStackError(
            f"kernel 'triton_paged' has heads of up to {MAX_HEAD_SIZE} elements, layer {layer.index} has {size}; use kernel = \"naive\""
        )
    tile = _INTERPRETED if interpret else _TILES[dtype.itemsize, max(64, triton.next_power_of_2(size))][0 if decoding else 1]
    return tile._replace(rows=max(tile.rows, triton.next_power_of_2(layer.group)))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """Where the rows' positions lie, for both layouts."""

    places: torch.Tensor
    block_size: int  # 0: `places` are starts of regions
    decoding: bool


class TritonPagedKernel(Kernel):
    """Paged attention in Triton. With `interpret`, on CPU tensors in Triton's interpreter."""

    def __init__(self, layers: Sequence[LayerSpec], *, dtype: torch.dtype, device: torch.device, interpret: bool = False) -> None:
        """Raises ConfigError where Triton was imported for the other way of running, IncompatibleStackError for too wide heads."""
        super().__init__(layers, dtype=dtype, device=device)
        if interpret != _IMPORTED_TO_INTERPRET:
            raise ConfigError(
                f"kernel.interpret is {str(interpret).lower()}, but Triton was imported to {'compile' if interpret else 'interpret'}: "
                f"start the process with TRITON_INTERPRET={int(interpret)}"
            )
        self._interpret = interpret
        # (layer.index, decoding): chosen once, since a launch costs enough as it is.
        self._tiles = {
            (layer.index, decoding): tile_for(layer, dtype, decoding=decoding, interpret=interpret)
            for layer in self.layers
            for decoding in (False, True)
        }

    def prepare(self, meta: AttentionMetadata) -> _Step:
        """The layout; nothing is computed. Raises PluginContractError if there is none."""
        decoding = meta.max_query_len <= 1
        if meta.region_starts is not None:
            return _Step(places=meta.region_starts, block_size=0, decoding=decoding)
        if meta.block_table is not None:
            return _Step(places=meta.block_table, block_size=meta.block_size, decoding=decoding)
        raise PluginContractError("AttentionMetadata has neither region_starts nor block_table; one of them must be set")

    def write(self, cache: LayerCache, k: torch.Tensor, v: torch.Tensor, meta: AttentionMetadata, prepared: Any) -> None:
        """As `Kernel.write`, in one launch that leaves out tokens of slot -1."""
        if k.shape[0] == 0:
            return
        arguments = write_arguments(cache, k, v, meta)
        with torch.cuda.device_of(k):
            write_slots[(triton.cdiv(k.shape[0], arguments["TOKENS"]),)](**arguments, **COMPILER_OPTIONS)

    def attend(self, q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, prepared: Any, layer: LayerSpec) -> torch.Tensor:
        """q [T, H, Dk] -> [T, H, Dv] in q's dtype; tokens of empty rows, and behind the last row, get zeros."""
        # The interpreter doesn't round to bf16, it truncates: there, torch rounds.
        dtype = torch.float32 if self._interpret else q.dtype
        output = torch.empty(q.shape[0], layer.num_heads, layer.head_size_v, dtype=dtype, device=q.device)
        if q.shape[0] == 0:
            return output.to(q.dtype)
        tile = self._tiles[layer.index, prepared.decoding]
        # Every row may leave one tile unfinished, and so may the tokens behind the last row.
        tiles = q.shape[0] // (tile.rows // layer.group) + meta.num_rows + 1
        arguments = attend_arguments(q, cache, output, meta, prepared, layer, tile=tile, upcast=self._interpret)
        with torch.cuda.device_of(q):
            attend_tiles[(tiles, layer.num_kv_heads)](**arguments, **compiler_options(tile))
        return output.to(q.dtype)


def compiler_options(tile: Tile) -> dict[str, Any]:
    """How Triton compiles `attend_tiles` for a tile."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **COMPILER_OPTIONS}


def attend_arguments(
    q: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
    meta: AttentionMetadata,
    step: _Step,
    layer: LayerSpec,
    *,
    tile: Tile,
    upcast: bool,
) -> dict[str, Any]:
    """What `attend_tiles` is launched with, by name."""
    q = _dense_heads(q)
    k_cache, v_cache = cache
    return {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "output": output,
        "sinks": layer.sinks,
        "query_start": meta.query_start,
        "seq_lens": meta.seq_lens,
        "places": step.places,
        "num_rows": meta.num_rows,
        "num_tokens": q.shape[0],
        "scale": layer.scale,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_slot_stride": k_cache.stride(0),
        "k_head_stride": k_cache.stride(1),
        "v_slot_stride": v_cache.stride(0),
        "v_head_stride": v_cache.stride(1),
        "place_stride": step.places.stride(0),
        "GROUP": layer.group,
        "K_SIZE": layer.head_size_k,
        "V_SIZE": layer.head_size_v,
        "BLOCK_SIZE": step.block_size,
        "WINDOW": layer.window,
        "SOFTCAP": layer.softcap,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "UPCAST": upcast,
    }


def write_arguments(cache: LayerCache, k: torch.Tensor, v: torch.Tensor, meta: AttentionMetadata) -> dict[str, Any]:
    """What `write_slots` is launched with, by name."""
    k, v = _dense_heads(k), _dense_heads(v)
    k_cache, v_cache = cache
    num_kv_heads = k.shape[1]
    k_padded, v_padded = (triton.next_power_of_2(num_kv_heads * tensor.shape[2]) for tensor in (k, v))
    return {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slots": meta.slots,
        "num_tokens": k.shape[0],
        "num_kv_heads": num_kv_heads,
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v_token_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "k_slot_stride": k_cache.stride(0),
        "k_slot_head_stride": k_cache.stride(1),
        "v_slot_stride": v_cache.stride(0),
        "v_slot_head_stride": v_cache.stride(1),
        "K_SIZE": k.shape[2],
        "V_SIZE": v.shape[2],
        "K_PADDED": k_padded,
        "V_PADDED": v_padded,
        "TOKENS": max(1, _WRITTEN_ELEMENTS // max(k_padded, v_padded)),
    }


def _dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, unless the elements of a head do not follow each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

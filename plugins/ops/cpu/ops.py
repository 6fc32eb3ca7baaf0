"""The operations of a layer by the native library: see docs/adr/0012-native-library.md.

A row's result depends on nothing but the row: not on the other rows, nor on the number of threads. Must not know: models, attention.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence

import torch

from octavo.core.attention import StepAttention
from octavo.core.errors import PluginContractError
from octavo.core.model import Attend, Block, Ops
from octavo.core.native import Library
from octavo.core.native.library import TYPES
from octavo.core.quantization import Quantization
from octavo.plugins.ops.cpu.packing import AfterAttention, Arena, BeforeAttention, Layers, Packed


class CpuOps(Ops):
    """See `octavo.core.model.Ops`. What it cannot read (dtype, device, shape, gaps in the last dimension): PluginContractError."""

    copies_weights = True

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self._library = library
        self.dtype = dtype
        self._type = TYPES[str(dtype).removeprefix("torch.")]
        self._arena = Arena()
        self._layers: Layers | None = None  # of the model that `blocks` was last called for
        self._angles: tuple[torch.Tensor | None, torch.Tensor | None, tuple[int, int]] = (None, None, (0, 0))  # the last that were checked

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, quantization: Quantization | None = None) -> Packed:
        self._check(weight, "weight", (None, None))
        _check_biases(weight, [bias])
        return Packed(self._library, self._arena, [weight], None if bias is None else [bias], quantization)

    def pack_gate_up(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        quantization: Quantization | None = None,
    ) -> Packed:
        self._check(gate, "gate", (None, None))
        self._check(up, "up", gate.shape)
        _check_biases(gate, [gate_bias, up_bias])
        biases = None if gate_bias is None or up_bias is None else [gate_bias, up_bias]
        return Packed(self._library, self._arena, [gate, up], biases, quantization)

    def packed_bytes(self, packed: Packed) -> int:
        return packed.num_bytes

    def rows(self, packed: Packed, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype is not torch.int64 or not ids.is_cpu or ids.dim() != 1:
            raise PluginContractError(f"ops 'cpu': ids must be torch.int64 [T] on a CPU; the model gave {_told(ids)}")
        _check_groups(packed, 1)
        ids = ids.contiguous()
        if len(ids):
            low, high = (int(bound) for bound in ids.aminmax())
            if low < 0 or high >= packed.n:
                raise IndexError(f"ids {low} to {high} in a weight of {packed.n} rows")
        out = torch.empty(len(ids), packed.k, dtype=self.dtype)
        read = self._library.rows if packed.quantization is None else self._library.rows_of_codes
        read(packed.address, ids.data_ptr(), len(ids), out.data_ptr(), torch.get_num_threads())
        return out

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self._check(x, "x", (None, packed.k))
        _check_groups(packed, 1)
        out = torch.empty(len(x), packed.n, dtype=self.dtype)
        where = x.data_ptr(), x.stride(0), len(x), 0, 0, out.data_ptr(), packed.n
        _done(self._library.linear(packed.address, *where, torch.get_num_threads()))
        return out

    def linear_add(self, x: torch.Tensor, packed: Packed, residual: torch.Tensor) -> torch.Tensor:
        self._check(x, "x", (None, packed.k))
        rows = x.shape[0]
        self._check(residual, "residual", (rows, packed.n))
        _check_groups(packed, 1)
        stride, start = residual.stride(0), residual.data_ptr()
        if stride < packed.n and rows > 1:
            raise PluginContractError(f"ops 'cpu': rows of residual must not overlap, but the model gave {_told(residual)}")
        x = _apart(x, residual)
        where = x.data_ptr(), x.stride(0), rows, start, stride, start, stride
        _done(self._library.linear(packed.address, *where, torch.get_num_threads()))
        return residual

    def swiglu(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self._check(x, "x", (None, packed.k))
        _check_groups(packed, 2)
        out = torch.empty(len(x), packed.n, dtype=self.dtype)
        _done(self._library.swiglu(packed.address, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), torch.get_num_threads()))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        self._check(x, "x", x.shape)
        self._check(weight, "norm", (size,))
        rows = x if x.dim() == 3 else x.reshape(-1, 1, size)
        out = torch.empty(x.shape, dtype=self.dtype)
        (outer, inner, _), strides = rows.shape, rows.stride()
        self._library.norm(
            self._type,
            rows.data_ptr(),
            outer,
            inner,
            *strides[:2],
            size,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            inner * size,
            size,
            torch.get_num_threads(),
        )
        return out

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        self._check(x, "x", (None, None, None))
        tokens, heads, size = x.shape
        if size % 2:
            raise PluginContractError(f"ops 'cpu': heads must have an even size to be rotated; the model gave {_told(x)}")
        _check_angles(cos, sin, (tokens, size // 2))
        out = torch.empty(x.shape, dtype=self.dtype)
        self._library.rope(
            self._type,
            x.data_ptr(),
            tokens,
            heads,
            *x.stride()[:2],
            size // 2,
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            heads * size,
            size,
            torch.get_num_threads(),
        )
        return out

    def argmax(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self._check(x, "x", (None, packed.k))
        _check_groups(packed, 1)
        ids = torch.empty(len(x), dtype=torch.int64)
        _done(self._library.argmax(packed.address, x.data_ptr(), x.stride(0), len(x), ids.data_ptr(), torch.get_num_threads()))
        return ids

    def attention_inputs(
        self,
        x: torch.Tensor,
        packed: Packed,
        *,
        norm: torch.Tensor,
        eps: float,
        heads: tuple[int, int],
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made_of = norm, q_norm, k_norm
        block = packed.before
        if block is None or block.heads != heads or block.eps != eps or any(map(operator.is_not, block.made_of, made_of)):
            block = packed.before = self._before_attention(packed, made_of, eps, heads)
        self._check(x, "x", (None, packed.k))
        rows = x.shape[0]
        if cos is not self._angles[0] or sin is not self._angles[1] or self._angles[2] != (rows, block.size // 2):
            _check_angles(cos, sin, (rows, block.size // 2))
            self._angles = cos, sin, (rows, block.size // 2)
        x = x if x.stride(0) == packed.k else x.contiguous()
        out = torch.empty((rows, *block.shape), dtype=self.dtype)
        threads = torch.get_num_threads()
        _done(self._library.attention_inputs(block.address, x.data_ptr(), rows, cos.data_ptr(), sin.data_ptr(), out.data_ptr(), threads))
        q, k, v = out.split_with_sizes(block.split, 1)  # `split` goes through Python and takes three times as long
        return q, k, v

    def _before_attention(
        self, packed: Packed, norms: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], eps: float, heads: tuple[int, int]
    ) -> BeforeAttention:
        """What `attention_inputs` needs of a layer, checked once."""
        _check_groups(packed, 1)
        num_heads, num_kv_heads = heads
        size, rest = divmod(packed.n, num_heads + 2 * num_kv_heads)
        if rest or size % 2:
            wanted = f"{num_heads} + 2 * {num_kv_heads} heads of one even size"
            raise PluginContractError(f"ops 'cpu': the projection must have {wanted}; the model gave {packed.n} outputs")
        self._check(norms[0], "norm", (packed.k,))
        for head_norm in norms[1:]:
            if head_norm is not None:
                self._check(head_norm, "norm of heads", (size,))
        return BeforeAttention(packed, norms, eps, heads, size)

    def attention_outputs(
        self, attended: torch.Tensor, x: torch.Tensor, *, out: Packed, norm: torch.Tensor, eps: float, gate_up: Packed, down: Packed
    ) -> torch.Tensor:
        made_of = norm, gate_up, down
        block = out.after
        if block is None or block.eps != eps or any(map(operator.is_not, block.made_of, made_of)):
            block = out.after = self._after_attention(out, norm, eps, gate_up, down)
        rows = len(x)
        attended = attended.flatten(1)
        self._check(x, "x", (None, out.n))
        self._check(attended, "attended", (rows, out.k))
        x = x if x.stride(0) == out.n else x.contiguous()
        attended = _apart(attended, x)
        where = attended.data_ptr(), attended.stride(0), rows, x.data_ptr()
        _done(self._library.attention_outputs(block.address, *where, torch.get_num_threads()))
        return x

    def _after_attention(self, out: Packed, norm: torch.Tensor, eps: float, gate_up: Packed, down: Packed) -> AfterAttention:
        """What `attention_outputs` needs of a layer, checked once."""
        _check_groups(out, 1)
        _check_groups(gate_up, 2)
        _check_groups(down, 1)
        self._check(norm, "norm", (out.n,))
        shapes = [[packed.n, packed.k] for packed in (gate_up, down)]
        if shapes != [[gate_up.n, out.n], [out.n, gate_up.n]]:
            wanted = f"gate, up and the weight behind them must be [*, {out.n}] and [{out.n}, *]"
            raise PluginContractError(f"ops 'cpu': {wanted} of one inner size; the model gave {shapes[0]} and {shapes[1]}")
        return AfterAttention(out, norm, eps, gate_up, down)

    def blocks(
        self,
        x: torch.Tensor,
        blocks: Sequence[Block],
        attend: Attend,
        *,
        heads: tuple[int, int],
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """In one call of the library, where its kernel attends: in a step of one row, going through Python in each layer took a sixth."""
        attention = attend.native_calls() if isinstance(attend, StepAttention) else None
        if attention is None or attention.library is not self._library:
            return super().blocks(x, blocks, attend, heads=heads, eps=eps, cos=cos, sin=sin)
        layers, made_of = self._layers, (blocks, heads, eps, attention.shapes, attention.dtype)
        if layers is None or layers.made_of != made_of:
            layers = self._layers = self._bound(*made_of)
        rows = attention.tokens
        self._check(x, "x", (rows, layers.hidden))
        _check_angles(cos, sin, (rows, layers.size // 2))
        x = x if x.stride(0) == layers.hidden else x.contiguous()
        qkv, attended = (torch.empty(rows, width, dtype=self.dtype) for width in layers.widths)
        buffers = cos.data_ptr(), sin.data_ptr(), qkv.data_ptr(), attended.data_ptr()
        arrays = ctypes.addressof(layers.array), ctypes.addressof(attention.calls)
        _done(self._library.blocks(*arrays, len(blocks), x.data_ptr(), rows, *buffers, torch.get_num_threads()))
        return x

    def _bound(
        self, blocks: Sequence[Block], heads: tuple[int, int], eps: float, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Layers:
        """What `blocks` needs of a model and of a kernel's layers of these shapes and type, checked once."""
        layers = [
            (
                self._before_attention(block.qkv, (block.input_norm, block.q_norm, block.k_norm), eps, heads),
                self._after_attention(block.out, block.mlp_norm, eps, block.gate_up, block.down),
            )
            for block in blocks
        ]
        size, hidden = layers[0][0].size, blocks[0].qkv.k
        found = [(block.qkv.k, block.out.n, block.out.k, before.size) for block, (before, _) in zip(blocks, layers, strict=True)]
        wanted = hidden, hidden, heads[0] * size, size
        if any(widths != wanted for widths in found):
            sizes = "inputs, outputs, inputs of `out` and head size"
            raise PluginContractError(f"ops 'cpu': {sizes} must be {wanted} in all layers, not {found}")
        made_of, shape = (blocks, heads, eps, shapes, dtype), (*heads, size, size)
        if dtype != self.dtype or shapes != (shape,) * len(blocks):
            raise PluginContractError(
                f"ops 'cpu': the model has {len(blocks)} layers of heads and head sizes {shape} in {self.dtype}, the kernel "
                f"{shapes} in {dtype}"
            )
        return Layers(layers, made_of, hidden=hidden, size=size, widths=(blocks[0].qkv.n, blocks[0].out.k))

    def _check(self, tensor: torch.Tensor, name: str, shape: tuple[int | None, ...]) -> None:
        """The library reads addresses and checks nothing. Of a shape, None fits any size."""
        found = tensor.shape
        if (
            tensor.dtype is not self.dtype
            or not tensor.is_cpu
            or len(found) != len(shape)
            or tensor.stride(-1) != 1
            or (found[-1] != shape[-1] and shape[-1] is not None)
            or (found[0] != shape[0] and shape[0] is not None)
        ):
            sizes = ", ".join("*" if size is None else str(size) for size in shape)
            wanted = f"{self.dtype} [{sizes}] on a CPU, its last dimension without gaps"
            raise PluginContractError(f"ops 'cpu': {name} must be {wanted}; the model gave {_told(tensor)}")


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}, shape {list(tensor.shape)}, strides {list(tensor.stride())}"


def _apart(x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """x [T, in], copied where it may lie in the memory of `written` [T, out]: rows are written while others are read."""
    starts = x.data_ptr(), written.data_ptr()
    ends = [start + (len(t) * t.stride(0) + t.shape[1]) * t.element_size() for start, t in zip(starts, (x, written), strict=True)]
    return x.clone(memory_format=torch.contiguous_format) if starts[0] < ends[1] and starts[1] < ends[0] else x


def _check_groups(packed: Packed, groups: int) -> None:
    if packed.groups != groups:
        made = {1: "pack", 2: "pack_gate_up"}
        raise PluginContractError(f"ops 'cpu': this wants a weight of {made[groups]}; the model gave one of {made[packed.groups]}")


def _check_biases(weight: torch.Tensor, biases: list[torch.Tensor | None]) -> None:
    given = [bias for bias in biases if bias is not None]
    if given and (len(given) != len(biases) or any(bias.shape != weight.shape[:1] for bias in given)):
        shapes = [None if bias is None else list(bias.shape) for bias in biases]
        raise PluginContractError(f"ops 'cpu': biases must be [{len(weight)}] each, all or none; the model gave {shapes}")


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, shape: tuple[int, int]) -> None:
    for tensor in (cos, sin):
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.shape != shape or not tensor.is_contiguous():
            wanted = f"torch.float32 {list(shape)} on a CPU without gaps"
            raise PluginContractError(f"ops 'cpu': cos and sin must be {wanted}; the model gave {_told(tensor)}")


def _done(status: int) -> None:
    if status:
        raise MemoryError("ops 'cpu': there is no memory left for a step's activations; use a smaller max_num_batched_tokens")

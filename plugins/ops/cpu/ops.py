"""The operations of a layer by the native library: see docs/adr/0012-native-library.md.

A row's result depends on nothing but the row: not on the other rows, nor on the number of threads. Must not know: models, attention.
"""

from __future__ import annotations

import torch

from octavo.core.errors import PluginContractError
from octavo.core.model import Ops
from octavo.core.native import Library
from octavo.core.native.library import TYPES
from octavo.plugins.ops.cpu.packing import Arena, Packed


class CpuOps(Ops):
    """See `octavo.core.model.Ops`. Tensors of another dtype or device, or whose last dimension has gaps: PluginContractError."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self._library = library
        self.dtype = dtype
        self._type = TYPES[str(dtype).removeprefix("torch.")]
        self._arena = Arena(library)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        self._check(weight, "weight")
        return Packed(self._library, self._arena, [weight], None if bias is None else [bias])

    def pack_gate_up(
        self, gate: torch.Tensor, up: torch.Tensor, *, gate_bias: torch.Tensor | None = None, up_bias: torch.Tensor | None = None
    ) -> Packed:
        self._check(gate, "gate")
        self._check(up, "up")
        biases = None if gate_bias is None or up_bias is None else [gate_bias, up_bias]
        return Packed(self._library, self._arena, [gate, up], biases)

    def packed_bytes(self, packed: Packed) -> int:
        return packed.num_bytes

    def rows(self, packed: Packed, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.contiguous()
        if len(ids):
            low, high = (int(bound) for bound in ids.aminmax())
            if low < 0 or high >= packed.n:
                raise IndexError(f"ids {low} to {high} in a weight of {packed.n} rows")
        out = torch.empty(len(ids), packed.k, dtype=self.dtype)
        self._library.rows(packed.address, ids.data_ptr(), len(ids), out.data_ptr(), torch.get_num_threads())
        return out

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self._check(x, "x", packed.k)
        out = torch.empty(len(x), packed.n, dtype=self.dtype)
        where = x.data_ptr(), x.stride(0), len(x), 0, 0, out.data_ptr(), packed.n
        _done(self._library.linear(packed.address, *where, torch.get_num_threads()))
        return out

    def linear_add(self, x: torch.Tensor, packed: Packed, residual: torch.Tensor) -> torch.Tensor:
        self._check(x, "x", packed.k)
        self._check(residual, "residual", packed.n)
        to = residual.data_ptr(), residual.stride(0)
        _done(self._library.linear(packed.address, x.data_ptr(), x.stride(0), len(x), *to, *to, torch.get_num_threads()))
        return residual

    def swiglu(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self._check(x, "x", packed.k)
        out = torch.empty(len(x), packed.n, dtype=self.dtype)
        _done(self._library.swiglu(packed.address, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), torch.get_num_threads()))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        self._check(x, "x")
        self._check(weight, "norm", size)
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
        self._check(x, "x")
        tokens, heads, size = x.shape
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
        self._check(x, "x", packed.k)
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
        self._check(x, "x", packed.k)
        rows, (num_heads, num_kv_heads) = len(x), heads
        size = packed.n // (num_heads + 2 * num_kv_heads)
        self._check(norm, "norm", packed.k)
        _check_angles(cos, sin, (rows, size // 2))
        for head_norm in (q_norm, k_norm):
            if head_norm is not None:
                self._check(head_norm, "norm of heads", size)
        x = x if x.stride(0) == packed.k else x.contiguous()
        out = torch.empty(rows, num_heads + 2 * num_kv_heads, size, dtype=self.dtype)
        _done(
            self._library.attention_inputs(
                packed.address,
                x.data_ptr(),
                rows,
                norm.data_ptr(),
                eps,
                0 if q_norm is None else q_norm.data_ptr(),
                0 if k_norm is None else k_norm.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                num_heads,
                num_kv_heads,
                size,
                out.data_ptr(),
                torch.get_num_threads(),
            )
        )
        q, k, v = out.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q, k, v

    def gated_mlp(self, x: torch.Tensor, gate_up: Packed, down: Packed, *, norm: torch.Tensor, eps: float) -> torch.Tensor:
        self._check(x, "x", gate_up.k)
        self._check(norm, "norm", gate_up.k)
        x = x if x.stride(0) == gate_up.k else x.contiguous()
        threads = torch.get_num_threads()
        _done(self._library.gated_mlp(gate_up.address, down.address, x.data_ptr(), len(x), norm.data_ptr(), eps, threads))
        return x

    def _check(self, tensor: torch.Tensor, name: str, size: int | None = None) -> None:
        """The library reads addresses and checks nothing."""
        if tensor.dtype is not self.dtype or tensor.is_cuda or tensor.stride(-1) != 1 or (size is not None and tensor.shape[-1] != size):
            wanted = f"{self.dtype} on a CPU, its last dimension {'' if size is None else f'of {size} '}without gaps"
            found = f"{tensor.dtype} on {tensor.device}, shape {list(tensor.shape)}, strides {list(tensor.stride())}"
            raise PluginContractError(f"ops 'cpu': {name} must be {wanted}; the model gave {found}")


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, shape: tuple[int, int]) -> None:
    for tensor in (cos, sin):
        if tensor.dtype is not torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"
            raise PluginContractError(f"ops 'cpu': cos and sin must be torch.float32 {list(shape)} without gaps; the model gave {found}")


def _done(status: int) -> None:
    if status:
        raise MemoryError("ops 'cpu': there is no memory left for a step's activations; use a smaller max_num_batched_tokens")

"""Weights in the native library's layout, in memory of huge pages. Must not know: what is computed with them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from ctypes import c_int64

import torch

from octavo.core.native import Block, BlockInputs, BlockOutputs, Library, PackedLinear
from octavo.core.native.library import QUANTIZATIONS, TYPES
from octavo.core.quantization import Quantization, QuantizedWeight, quantize

_HUGE_PAGE = 2 * 2**20
_CHUNK = 32 * 2**20
_LINE = 64  # bytes of a cache line


class Arena:
    """Hands out memory from large chunks, so that small weights lie in huge pages too. A chunk lives as long as any piece of it.

    What of a chunk is never handed out is never touched, and takes no memory but for the rest of a page: chunks are mapped, since malloc
    may hand out pages that were written to before.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], not initialised, at the start of a cache line. Raises MemoryError."""
        taken = -(-num_bytes // _LINE) * _LINE
        if taken > len(self._left):
            self._left = _chunk(max(_CHUNK, -(-taken // _HUGE_PAGE) * _HUGE_PAGE))
        piece, self._left = self._left[:num_bytes], self._left[taken:]
        return piece


def _chunk(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros that nobody touched, of huge pages where the system has them.

    Weights are read from end to end, and pages of 4 KiB spend as long on address translation as on data.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"packed weights need {num_bytes} bytes more than there are: {error}") from None
    with suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)  # which keeps `mapped`
    return memory[-memory.data_ptr() % _HUGE_PAGE :][:num_bytes]


class Packed:
    """Linears [n, k] of which `groups` are computed together, with the struct that the library reads.

    `address` is that struct's; `n` are the outputs of a group. `before`, `after`: kept here by the ops, of a layer that begins with this
    projection, or whose attention is followed by it.
    """

    before: BeforeAttention | None = None
    after: AfterAttention | None = None

    def __init__(
        self,
        library: Library,
        arena: Arena,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor] | None,
        quantization: Quantization | None,
    ) -> None:
        """Copy weights [n, k] of one dtype and shape whose rows have no gaps, and biases [n]: the originals are not needed any more."""
        self._library, self.groups, self.quantization = library, len(weights), quantization
        self.n, self.k = weights[0].shape
        self.dtype = weights[0].dtype
        kind = TYPES[str(self.dtype).removeprefix("torch.")]
        size, columns = c_int64(), c_int64()
        library.packed_sizes(kind, self.n, self.k, self.groups, ctypes.byref(size), ctypes.byref(columns))
        if quantization is not None:
            library.codes_size(QUANTIZATIONS[quantization], self.n, self.k, self.groups, ctypes.byref(size))
        self.panels = arena.take(size.value)
        self.bias = None if biases is None else self._interleaved(biases, columns.value)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self._struct = PackedLinear(self.panels.data_ptr(), bias, self.n, self.k, kind, self.groups, QUANTIZATIONS[quantization])
        self.address = ctypes.addressof(self._struct)
        for group, weight in enumerate(weights):
            if quantization is None:
                library.pack(self.address, weight.data_ptr(), weight.stride(0), group, torch.get_num_threads())
            else:
                self._pack_codes(quantize(weight, quantization), group)

    def _pack_codes(self, weight: QuantizedWeight, group: int) -> None:
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        minima = None if weight.minima is None else weight.minima.contiguous()
        where = codes.data_ptr(), scales.data_ptr(), 0 if minima is None else minima.data_ptr()
        self._library.pack_codes(self.address, *where, group, torch.get_num_threads())

    def _interleaved(self, biases: list[torch.Tensor], columns: int) -> torch.Tensor:
        """Biases in fp32 and the order of the panels: some columns of the first group, as many of the second, and so on."""
        width = columns // self.groups  # columns of a group, padded to whole panels
        padded = torch.zeros(self.groups, width)
        for group, bias in enumerate(biases):
            padded[group, : self.n] = bias
        per_panel = self._library.panel_columns
        return padded.view(self.groups, -1, per_panel).transpose(0, 1).flatten()

    @property
    def num_bytes(self) -> int:
        """Bytes of panels and bias."""
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)


class BeforeAttention:
    """A layer's projection to q, k and v with what comes before and after it, and the struct that the library reads, at `address`.

    Made once a layer: checking and converting it anew took a third of a call.
    """

    def __init__(
        self,
        packed: Packed,
        norms: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        eps: float,
        heads: tuple[int, int],
        size: int,
    ) -> None:
        """`norms`: of the input, of heads of q and of k; `heads`: of q and of k, each of `size`."""
        self.made_of, self.eps, self.heads, self.size = norms, eps, heads, size
        self.split = [heads[0], heads[1], heads[1]]
        self.shape = sum(self.split), size  # of a token's q, k and v
        addresses = (0 if norm is None else norm.data_ptr() for norm in norms)
        self._struct = BlockInputs(packed.address, *addresses, *heads, size, eps)
        self.address = ctypes.addressof(self._struct)


class AfterAttention:
    """What follows a layer's attention: its projection, a norm, the gated MLP; and the struct that the library reads, at `address`."""

    def __init__(self, out: Packed, norm: torch.Tensor, eps: float, gate_up: Packed, down: Packed) -> None:
        self.made_of, self.eps = (norm, gate_up, down), eps
        self._struct = BlockOutputs(out.address, gate_up.address, down.address, norm.data_ptr(), eps)
        self.address = ctypes.addressof(self._struct)


class Layers:
    """All layers of a model, and the array that the library reads. `made_of` says of what, as it is compared in each step.

    `widths`: of a token's q, k and v, and of what its attention gives.
    """

    def __init__(
        self,
        layers: list[tuple[BeforeAttention, AfterAttention]],
        made_of: tuple[object, ...],
        *,
        hidden: int,
        size: int,
        widths: tuple[int, int],
    ) -> None:
        self.made_of, self.hidden, self.size, self.widths = made_of, hidden, size, widths
        self._layers = layers  # which the array points to
        self.array = (Block * len(layers))(*(Block(before.address, after.address) for before, after in layers))

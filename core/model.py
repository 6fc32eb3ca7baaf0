"""What a model is, and the operations (`Ops`) that it is made of.

A model turns tokens into logits. It asks for attention through a callback and must not know kernels, caches, slots or requests.
Symbols: T tokens of a step, R of them whose logits are wanted, H query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from octavo.core.attention import LayerSpec
from octavo.core.descriptors import ModelShape


class Attend(Protocol):
    """Attention of one layer over everything cached so far, this step's tokens included."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, Dk], k [T, G, Dk], v [T, G, Dv] -> [T, H, Dv]. Called exactly once for each layer."""


class Model(ABC):
    """A causal language model over a flattened batch: no padding, no batch dimension, no phases.

    A step calls `forward` once, then `logits` or `argmax` on what it gave, whole or a slice of rows at a time: a row of logits is a
    thousand times as large as what it is made from where the logits of a whole prompt are wanted.
    """

    shape: ModelShape
    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
        """Run all layers: input_ids [T] and positions [T] (int64) -> [R, ...], what the head needs of the tokens at `rows`.

        `rows` [R] are indices into T (int64), in any order, perhaps none. The result is opaque but for its first dimension.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head: any rows [R, ...] of what `forward` gave -> logits [R, V]. A row depends on nothing but itself."""

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """Their most likely ids [R] int64, the lowest where several are. Ops may fuse it with the head."""
        return self.logits(hidden).argmax(-1)

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device, tied weights once."""


class Ops(ABC):
    """Linears, norms, RoPE and activations: torch's, or a device's own. Attention is not among them.

    `pack` takes a weight over in whatever layout is fast here; what it returns is opaque to the model, which hands it back to the
    other methods. Fused forms exist where a fusion pays on some device; plain ops compute them in two steps.
    """

    @abstractmethod
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Take over weight [out, in] and bias [out] of a linear."""

    @abstractmethod
    def pack_gate_up(
        self, gate: torch.Tensor, up: torch.Tensor, *, gate_bias: torch.Tensor | None = None, up_bias: torch.Tensor | None = None
    ) -> Any:
        """Take over the two weights [inner, in] that `swiglu` needs, and their biases [inner]: both or none."""

    @abstractmethod
    def packed_bytes(self, packed: Any) -> int:
        """Bytes that a packed weight takes on the device."""

    @abstractmethod
    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, in] -> [T, out]."""

    @abstractmethod
    def linear_add(self, x: torch.Tensor, packed: Any, residual: torch.Tensor) -> torch.Tensor:
        """residual [T, out] + linear(x) ; may write into residual."""

    @abstractmethod
    def swiglu(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """silu(gate(x)) * up(x): x [T, in] -> [T, inner]."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, computed in fp32, returned in x's dtype."""

    @abstractmethod
    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, D] by cos, sin [T, D/2] in the half-split form (GPT-NeoX); may work in place."""

    @abstractmethod
    def argmax(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """argmax over the last dimension of linear(x): x [R, in] -> [R] int64, the lowest id wins a tie."""

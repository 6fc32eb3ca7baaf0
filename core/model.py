"""What a model is, and the operations (`Ops`) that it is made of.

A model turns tokens into logits. It asks for attention through a callback and must not know kernels, caches, slots or requests.
Symbols: T tokens of a step, R of them whose logits are wanted, H query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from octavo.core.attention import LayerSpec
from octavo.core.descriptors import ModelShape
from octavo.core.quantization import Quantization
from octavo.core.sampler import most_likely


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
        """Their ids [R] int64 as `most_likely` of `core.sampler` gives them. Ops may fuse it with the head."""
        return most_likely(self.logits(hidden))

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device, tied weights once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Weights of a layer: attention, then a gated MLP, an RMS norm before each. Those typed Any are packed by the ops."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Any  # hidden -> (H + 2 G) D
    q_norm: torch.Tensor | None  # [D], of each head
    k_norm: torch.Tensor | None  # [D]
    out: Any  # H D -> hidden
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Any  # hidden -> 2 inner
    down: Any  # inner -> hidden


class Ops(ABC):
    """Linears, norms, RoPE and activations: torch's, or a device's own. Attention is not among them.

    `pack` takes a weight over in whatever layout is fast here; what it returns is opaque to the model, which hands it back to the
    other methods. Fused forms exist where a fusion pays on some device; plain ops compute them in two steps. The three at the end
    are made of the others here, and ops that do better in one call override them.
    """

    copies_weights: bool = False
    """Whether `pack` copies what it is given, so that the weights may be views of a mapped file, which is let go of afterwards."""

    @abstractmethod
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, quantization: Quantization | None = None) -> Any:
        """Take over weight [out, in] and bias [out] of a linear.

        `quantization`: hold what `core.quantization.quantize` makes of the weight. Ops are asked for one only where their descriptor
        provides `weights:int8` or `weights:int4`.
        """

    @abstractmethod
    def pack_gate_up(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        quantization: Quantization | None = None,
    ) -> Any:
        """Take over the two weights [inner, in] that `swiglu` needs, and their biases [inner]: both or none."""

    @abstractmethod
    def packed_bytes(self, packed: Any) -> int:
        """Bytes that a packed weight takes on the device."""

    @abstractmethod
    def rows(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the packed weight, as they came or as quantization left them: ids [T] int64 -> [T, in]. A tied head's embedding."""

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
        """`most_likely` of linear(x): x [R, in] -> [R] int64. The lowest id wins a tie; below 0: NaN or infinity is the greatest."""

    def attention_inputs(
        self,
        x: torch.Tensor,
        packed: Any,
        *,
        norm: torch.Tensor,
        eps: float,
        heads: tuple[int, int],
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a block does before its attention: q [T, H, D], k and v [T, G, D] of x [T, in], `heads` being (H, G).

        RMS norm of x, the packed projection in -> (H + 2 G) D, an RMS norm of each head of q and k where there are weights [D], RoPE.
        """
        num_heads, num_kv_heads = heads
        qkv = self.linear(self.rms_norm(x, norm, eps), packed).unflatten(1, (num_heads + 2 * num_kv_heads, -1))
        qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if q_norm is not None and k_norm is not None:
            q = self.rms_norm(qk[:, :num_heads], q_norm, eps)
            k = self.rms_norm(qk[:, num_heads:], k_norm, eps)
            return self.rope(q, cos, sin), self.rope(k, cos, sin), v
        qk = self.rope(qk, cos, sin)
        return qk[:, :num_heads], qk[:, num_heads:], v

    def attention_outputs(
        self, attended: torch.Tensor, x: torch.Tensor, *, out: Any, norm: torch.Tensor, eps: float, gate_up: Any, down: Any
    ) -> torch.Tensor:
        """What a block does after its attention, whose heads are attended [T, H, Dv]; may write into x [T, in].

        x + out(attended), then of that sum y: y + down(swiglu(rms_norm(y))).
        """
        x = self.linear_add(attended.flatten(1), out, x)
        return self.linear_add(self.swiglu(self.rms_norm(x, norm, eps), gate_up), down, x)

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
        """x [T, hidden] through all layers of a model; may write into x. `blocks` is the same sequence in each step."""
        for index, block in enumerate(blocks):
            q, k, v = self.attention_inputs(
                x,
                block.qkv,
                norm=block.input_norm,
                eps=eps,
                heads=heads,
                q_norm=block.q_norm,
                k_norm=block.k_norm,
                cos=cos,
                sin=sin,
            )
            attended = attend(index, q, k, v)
            x = self.attention_outputs(attended, x, out=block.out, norm=block.mlp_norm, eps=eps, gate_up=block.gate_up, down=block.down)
        return x

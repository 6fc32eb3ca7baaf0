"""The model: embedding, blocks of attention and a gated MLP, RMS norms before each, LM head.

Symbols: T tokens of a step, R of them whose logits are wanted, H query heads, G KV heads, D head size.
Must not know: kernels, caches, requests, which device's ops it runs on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from octavo.core.attention import LayerSpec
from octavo.core.model import Attend, Block, Model, Ops
from octavo.core.quantization import Quantization
from octavo.plugins.models.llama.config import LlamaConfig
from octavo.plugins.models.llama.rope import Rope
from octavo.plugins.models.llama.weights import Weights


class Llama(Model):
    """Llama, SmolLM, Mistral, Qwen2, Qwen3: see `octavo.core.model.Model`."""

    def __init__(
        self,
        config: LlamaConfig,
        ops: Ops,
        *,
        embedding: torch.Tensor | None,
        blocks: list[Block],
        norm: torch.Tensor,
        head: Any,
        weight_bytes: int,
    ) -> None:
        """`embedding` is None where it is tied to the head."""
        shape = config.shape
        self.shape = shape
        self.dtype = norm.dtype
        self.device = norm.device
        self.layers = tuple(
            LayerSpec(
                index=index,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size_k=shape.head_size_k,
                head_size_v=shape.head_size_v,
                scale=shape.head_size_k**-0.5,
                window=window,
            )
            for index, window in enumerate(shape.windows)
        )
        self._ops = ops
        self._heads = shape.num_heads, shape.num_kv_heads
        self._eps = config.rms_norm_eps
        self._rope = Rope(config.rope, shape.head_size_k, self.device)
        self._embedding = embedding  # [V, hidden], or None: the head's rows
        self._blocks = blocks
        self._norm = norm  # [hidden]
        self._head = head  # hidden -> V
        self._weight_bytes = weight_bytes

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
        ops, eps = self._ops, self._eps
        cos, sin = self._rope(positions)
        x = ops.rows(self._head, input_ids) if self._embedding is None else F.embedding(input_ids, self._embedding)  # [T, hidden]
        x = ops.blocks(x, self._blocks, attend, heads=self._heads, eps=eps, cos=cos, sin=sin)
        return ops.rms_norm(x[rows], self._norm, eps)  # [R, hidden]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(hidden, self._head)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.argmax(hidden, self._head)

    def weight_bytes(self) -> int:
        return self._weight_bytes


def load(
    config: LlamaConfig, folder: Path, ops: Ops, *, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None
) -> Llama:
    """Build the model from the weights in `folder`, as `dtype` on `device`. Raises ModelSourceError: see `Weights`.

    `quantization` is that of all linears, but for a head in int8 where it is int4: 4 bits there cost most. Norms and an embedding that is
    not tied to the head, of which a step reads a few rows, stay as they are.
    """
    weights = Weights(folder, dtype=dtype, device=device)
    # Old checkpoints hold the frequencies of RoPE; some with tied embeddings hold the head all the same.
    weights.check(_expected(config), ignored=("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied else ())))
    size = 0

    def weight(*names: str) -> torch.Tensor:
        return weights.load(*(f"{name}.weight" for name in names), mapped=ops.copies_weights)

    def pack(*names: str, bias: bool, kind: Quantization | None = quantization) -> Any:
        nonlocal size
        packed = ops.pack(
            weight(*names),
            weights.load(*(f"{name}.bias" for name in names)) if bias else None,
            quantization=kind,
        )
        size += ops.packed_bytes(packed)
        return packed

    def plain(name: str) -> torch.Tensor:
        nonlocal size
        tensor = weights.load(f"{name}.weight")
        size += tensor.nbytes
        return tensor

    def gate_up(mlp: str) -> Any:
        nonlocal size
        gate, up = f"{mlp}.gate_proj", f"{mlp}.up_proj"
        biases = {"gate_bias": weights.load(f"{gate}.bias"), "up_bias": weights.load(f"{up}.bias")} if config.mlp_bias else {}
        packed = ops.pack_gate_up(weight(gate), weight(up), quantization=quantization, **biases)
        size += ops.packed_bytes(packed)
        return packed

    def block(prefix: str) -> Block:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Block(
            input_norm=plain(f"{prefix}.input_layernorm"),
            qkv=pack(*(f"{attention}.{name}_proj" for name in "qkv"), bias=config.qkv_bias),
            q_norm=plain(f"{attention}.q_norm") if config.qk_norm else None,
            k_norm=plain(f"{attention}.k_norm") if config.qk_norm else None,
            out=pack(f"{attention}.o_proj", bias=config.out_bias),
            mlp_norm=plain(f"{prefix}.post_attention_layernorm"),
            gate_up=gate_up(mlp),
            down=pack(f"{mlp}.down_proj", bias=config.mlp_bias),
        )

    embedding = None if config.tied else plain("model.embed_tokens")
    blocks = [block(f"model.layers.{index}") for index in range(config.shape.num_layers)]
    norm = plain("model.norm")
    head = pack("model.embed_tokens" if config.tied else "lm_head", bias=False, kind=quantization and "int8")
    return Llama(config, ops, embedding=embedding, blocks=blocks, norm=norm, head=head, weight_bytes=size)


def _expected(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    shape, hidden, inner = (config.shape, config.shape.hidden_size, config.intermediate_size)
    q, kv = shape.num_heads * shape.head_size_k, shape.num_kv_heads * shape.head_size_k
    vocabulary = (shape.vocab_size, hidden)
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": (hidden,)}
    if not config.tied:
        expected["lm_head.weight"] = vocabulary
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": shape.head_size_k, "self_attn.k_norm": shape.head_size_k}
    for index in range(shape.num_layers):
        prefix = f"model.layers.{index}"
        for name, (rows, columns, bias) in linears.items():
            expected[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                expected[f"{prefix}.{name}.bias"] = (rows,)
        expected |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
    return expected

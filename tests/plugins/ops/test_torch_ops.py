"""The torch ops compute what transformers' modules compute; packing copies nothing but the joined gate and up."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from octavo.core.sampler import NOT_FINITE, NOTHING_LEFT
from octavo.plugins.ops.torch_ops import TORCH, octavo_ops
from octavo.plugins.ops.torch_ops.ops import TorchOps

ops = TorchOps()


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_descriptor_builds_the_ops() -> None:
    """One set of ops, named torch; no facts are needed to build it."""
    assert [plugin.name for plugin in octavo_ops()] == ["torch"]
    assert isinstance(TORCH.build(TORCH.options(), None), TorchOps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 16), (1, 7)])
def test_rms_norm_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype, atol: float) -> None:
    """In fp32 within 1e-6; in bf16 within an ulp of values around 4, with or without large inputs."""
    norm = LlamaRMSNorm(shape[-1], eps=1e-5)
    norm.weight.data = _random(shape[-1], seed=1, dtype=dtype)
    for scale in (1e-3, 1.0, 300.0):
        x = _random(*shape, dtype=dtype) * scale
        out = ops.rms_norm(x, norm.weight.data, 1e-5)
        assert out.dtype == dtype
        torch.testing.assert_close(out, norm(x).detach(), atol=atol, rtol=0)


def test_rms_norm_of_a_strided_view() -> None:
    """A slice of a fused projection is normed as its copy is."""
    x = _random(5, 6, 16)
    assert torch.equal(ops.rms_norm(x[:, :4], _random(16), 1e-6), ops.rms_norm(x[:, :4].contiguous(), _random(16), 1e-6))


@pytest.mark.parametrize("heads", [1, 3])
def test_rope_equals_transformers(heads: int) -> None:
    """The half-split rotation; views of a fused projection too."""
    fused = _random(7, heads + 2, 16)
    angles = _random(7, 8, seed=2) * 10
    x = fused[:, :heads]
    both = torch.cat([angles, angles], dim=-1)
    expected, _ = apply_rotary_pos_emb(x, x, both.cos(), both.sin(), unsqueeze_dim=1)
    torch.testing.assert_close(ops.rope(x, angles.cos(), angles.sin()), expected, atol=1e-6, rtol=0)


def test_rope_of_bf16_rotates_in_fp32() -> None:
    """The result is the fp32 rotation, rounded once."""
    x, angles = _random(7, 2, 16, dtype=torch.bfloat16), _random(7, 8, seed=2) * 10
    cos, sin = angles.cos(), angles.sin()
    assert torch.equal(ops.rope(x.clone(), cos, sin), ops.rope(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("bias", [False, True])
def test_linears(bias: bool) -> None:
    """linear, linear_add and swiglu are their formulas, with and without biases."""
    x, weight, up, residual = (_random(5, 8), _random(6, 8, seed=1), _random(6, 8, seed=2), _random(5, 6, seed=3))
    b, up_b = (_random(6, seed=4), _random(6, seed=5)) if bias else (None, None)
    packed = ops.pack(weight, b)
    expected = F.linear(x, weight, b)
    assert torch.equal(ops.linear(x, packed), expected)
    torch.testing.assert_close(ops.linear_add(x, packed, residual.clone()), residual + expected, atol=1e-5, rtol=0)
    gated = ops.swiglu(x, ops.pack_gate_up(weight, up, gate_bias=b, up_bias=up_b))
    torch.testing.assert_close(gated, F.silu(expected) * F.linear(x, up, up_b), atol=1e-5, rtol=0)


def test_packing_copies_nothing_and_counts_bytes() -> None:
    """A tied head shares its embedding's memory."""
    weight = _random(6, 8)
    assert ops.pack(weight).weight.data_ptr() == weight.data_ptr()
    assert ops.packed_bytes(ops.pack(weight, _random(6))) == 4 * (6 * 8 + 6)
    assert ops.packed_bytes(ops.pack_gate_up(weight, weight)) == 4 * 2 * 6 * 8


def test_argmax_takes_the_lowest_id_of_a_tie() -> None:
    """Also far apart and in a row of equal logits."""
    weight = torch.zeros(5000, 2)
    weight[[17, 4900], 0] = 1.0
    best = ops.argmax(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), ops.pack(weight))
    assert best.tolist() == [17, 0, 0]


def test_argmax_of_what_is_not_finite_is_no_id() -> None:
    """As the sampling step says it: a broken row becomes an error, not a token."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    rows = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [1.0, 2.0], [-torch.inf, 1.0]])
    assert ops.argmax(rows, ops.pack(weight)).tolist() == [NOT_FINITE, NOT_FINITE, 1, NOT_FINITE]  # infinity times 0 is NaN
    assert ops.argmax(torch.zeros(1, 2), ops.pack(weight, torch.full((2,), -torch.inf))).tolist() == [NOTHING_LEFT]

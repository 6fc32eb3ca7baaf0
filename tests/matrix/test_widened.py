"""The linears that 16-bit tests compare with are torch's own."""

from __future__ import annotations

import pytest
import torch

from octavo.core.sampler import most_likely
from octavo.plugins.ops.torch_ops.ops import TorchOps
from tests.matrix.widened import WidenedOps

SHAPES = [(1, 64, 96), (1, 577, 130), (7, 576, 100), (33, 96, 64), (64, 130, 33)]  # rows, in, out


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_each_op_is_torchs(rows: int, k: int, n: int, biased: bool) -> None:
    """Nearly all values are equal, the others next to each other: sums in fp32 differ by their order, and round up or down by that."""
    x, weight, up, residual = randn(rows, k, seed=1), randn(n, k, seed=2) / k**0.5, randn(n, k, seed=3) / k**0.5, randn(rows, n, seed=4)
    bias, up_bias = (randn(n, seed=5), randn(n, seed=6)) if biased else (None, None)
    found: list[list[torch.Tensor]] = []
    for ops in (TorchOps(), WidenedOps(torch.bfloat16)):
        packed = ops.pack(weight, bias)
        gate_up = ops.pack_gate_up(weight, up, gate_bias=bias, up_bias=up_bias)
        added = ops.linear_add(x, packed, residual.clone())
        found.append([ops.linear(x, packed), added, ops.swiglu(x, gate_up), ops.rows(packed, torch.tensor([n - 1, 0]))])
        assert torch.equal(ops.argmax(x, packed), most_likely(ops.linear(x, packed)))
    eps = torch.finfo(torch.bfloat16).eps
    for theirs, ours in zip(*found, strict=True):
        assert theirs.dtype is ours.dtype is torch.bfloat16
        assert float((theirs == ours).float().mean()) > 0.95
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=eps * float(found[0][0].abs().max()))  # a residual may cancel most
    assert torch.equal(found[0][3], found[1][3])

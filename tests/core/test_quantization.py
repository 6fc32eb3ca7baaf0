"""Codes are the nearest there are, and those of a Q4_1 file come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.errors import ModelSourceError
from octavo.core.quantization import GROUP, Quantization, quantize

KINDS: tuple[Quantization, ...] = ("int8", "int4")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 32), (4, 33), (7, 200)])
def test_no_weight_is_off_by_more_than_half_a_step(kind: Quantization, shape: tuple[int, int]) -> None:
    """A step of its row or group; least squares and fp16 may move an extreme of int4's a little further."""
    weight = randn(*shape)
    quantized = quantize(weight, kind)
    steps = quantized.scales if kind == "int8" else quantized.scales.repeat_interleave(GROUP, dim=1)[:, : shape[1]]
    allowed = 0.5001 * steps if kind == "int8" else steps + 2.0**-10 * weight.abs()
    assert bool(((quantized.dequantized(torch.float32) - weight).abs() <= allowed).all())


def test_int4_is_no_worse_than_its_extremes_alone() -> None:
    """The least-squares step only gains: over many groups the squared error is less than that of minimum and maximum / 15."""
    weight = randn(64, 32 * 20)
    groups = weight.view(64, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    plain = ((groups - low) / ((high - low) / 15)).round() * (high - low) / 15 + low
    ours = quantize(weight, "int4").dequantized(torch.float32).view_as(groups)
    assert (ours - groups).square().sum() < 0.99 * (plain - groups).square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_within_their_bits(kind: Quantization) -> None:
    """And every one is used by a matrix that is large enough."""
    codes = quantize(randn(64, 512), kind).codes.int()
    low, high = (-127, 127) if kind == "int8" else (0, 15)
    assert (int(codes.min()), int(codes.max())) == (low, high)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_rows_and_zeros_are_kept(kind: Quantization) -> None:
    """A scale of 0 divides nothing."""
    weight = torch.tensor([[0.0], [2.5], [-0.125]]).expand(3, 40).contiguous()
    torch.testing.assert_close(quantize(weight, kind).dequantized(torch.float32), weight, rtol=1e-6, atol=0)


def test_a_q4_1_file_keeps_its_codes() -> None:
    """Quantised by gguf's own code, dequantised, rounded to bf16 as such files are loaded: the same codes.

    Values differ by what bf16 took: 2**-9 of the largest of a group. Least squares turn that into an error of scales of a third of it (the
    codes' standard deviation is above 3), and of values of twice it.
    """
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_1
    weight = (randn(96, 640) / 10).numpy()
    stored = gguf.quants.quantize(weight, kind)
    values = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
    blocks = np.asarray(stored).view(np.uint8).reshape(-1, 20)  # fp16 scale, fp16 minimum, 16 bytes of two codes each
    theirs = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).reshape(96, 640)
    ours = quantize(values.bfloat16(), "int4")
    assert np.array_equal(ours.codes.numpy(), theirs)
    scales = blocks[:, :2].copy().view(np.float16).reshape(96, -1).astype(np.float32)
    lost = 2.0**-9 * values.view(96, -1, GROUP).abs().amax(-1)
    assert bool(((ours.scales - torch.from_numpy(scales)).abs() <= lost / 3 + 2.0**-11 * ours.scales).all())
    assert bool(((ours.dequantized(torch.float32) - values).abs() <= 2 * lost.repeat_interleave(GROUP, dim=1)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused(kind: Quantization, bad: float) -> None:
    """There is no scale for it."""
    weight = randn(3, 40)
    weight[1, 7] = bad
    with pytest.raises(ModelSourceError, match=rf"a weight \[3, 40\] cannot be held in {kind}: it has values that are not finite"):
        quantize(weight, kind)


def test_int4_refuses_what_fp16_cannot_hold() -> None:
    """Its minimum would be infinite."""
    with pytest.raises(
        ModelSourceError, match=r"cannot be held in int4: .* beyond the 65504 of fp16\. Load the model without quantization"
    ):
        quantize(torch.full((1, 32), -70_000.0), "int4")


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_change_nothing(kind: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are quantised a piece at a time."""
    weight = randn(50, 70)
    whole = quantize(weight, kind).dequantized(torch.float32)
    monkeypatch.setattr("octavo.core.quantization._PIECE", 200)
    assert torch.equal(quantize(weight, kind).dequantized(torch.float32), whole)

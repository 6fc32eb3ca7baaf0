"""Norm, RoPE, activation and cache writes equal torch in double precision, rounded once, at every level, size and stride."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from octavo.core.native import Library
from octavo.core.native.library import TYPES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 65, 127, 576]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}  # of a value: half a unit in the last place, and a little


def type_of(dtype: torch.dtype) -> int:
    return TYPES[str(dtype).removeprefix("torch.")]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, *, atol: float = 1e-6) -> None:
    """Within one rounding of `expected`, which is in double precision."""
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_norm(library: Library, dtype: torch.dtype, threads: int) -> None:
    """Also of views with strides between heads, and in place."""
    for size in SIZES:
        for scale in (1e-3, 1.0, 300.0):
            whole = random(5, 4, size, dtype=dtype, scale=scale)
            x, weight = whole[:, 1:3], random(size, dtype=dtype, seed=1)
            expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
            out = torch.full((5, 2, size), torch.nan, dtype=dtype)
            strides = (x.stride(0), x.stride(1), size)
            library.norm(
                type_of(dtype), x.data_ptr(), 5, 2, *strides, weight.data_ptr(), 1e-5, out.data_ptr(), out.stride(0), size, threads
            )
            close(out, expected)
            kept = whole[:, 3].clone()
            library.norm(type_of(dtype), x.data_ptr(), 5, 2, *strides, weight.data_ptr(), 1e-5, x.data_ptr(), *strides[:2], threads)
            assert torch.equal(x, out)
            assert torch.equal(whole[:, 3], kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_rope(library: Library, dtype: torch.dtype, threads: int) -> None:
    """The half-split rotation, of views and in place."""
    for half in SIZES[:-1]:
        whole = random(5, 4, 2 * half, dtype=dtype)
        x, angles = whole[:, 1:3], random(5, half, dtype=torch.float32, seed=2, scale=10)
        cos, sin = angles.cos(), angles.sin()
        (a, b), (c, s) = x.double().chunk(2, dim=-1), (cos.double()[:, None], sin.double()[:, None])
        expected = torch.cat([a * c - b * s, b * c + a * s], dim=-1)
        out = torch.full((5, 2, 2 * half), torch.nan, dtype=dtype)
        source = (x.data_ptr(), 5, 2, x.stride(0), x.stride(1), half, cos.data_ptr(), sin.data_ptr())
        library.rope(type_of(dtype), *source, out.data_ptr(), out.stride(0), out.stride(1), threads)
        close(out, expected, atol=1e-6 if dtype is torch.float32 else 1e-5)
        library.rope(type_of(dtype), *source, x.data_ptr(), x.stride(0), x.stride(1), threads)
        assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_16_bit_value_survives(library: Library, dtype: torch.dtype) -> None:
    """Reading and writing a value without change gives it back: infinities and subnormals of fp16 too (bf16's may become 0)."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    ordinary = ~x.isnan() & ((x.abs() >= torch.finfo(dtype).tiny) | (dtype is torch.float16))
    x = x[ordinary]
    out = torch.empty(len(x), 2, dtype=dtype)
    pairs = torch.stack([x, torch.zeros_like(x)], dim=1).contiguous()
    ones, zeros = torch.ones(len(x)), torch.zeros(len(x))
    library.rope(type_of(dtype), pairs.data_ptr(), len(x), 1, 2, 2, 1, ones.data_ptr(), zeros.data_ptr(), out.data_ptr(), 2, 2, 1)
    finite = x.isfinite()  # infinity times zero is NaN
    assert torch.equal(out[finite, 0], x[finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_torchs(library: Library, dtype: torch.dtype) -> None:
    """To nearest, ties to even, overflow to infinity: RoPE by an angle of 0 is a conversion of cos."""
    cos = torch.cat([random(4096, dtype=torch.float32, scale=scale) for scale in (1e-6, 1e-3, 1.0, 3e4)])
    cos = torch.cat([cos, 1 + torch.arange(512) * 2.0**-12])
    ones, zeros = torch.zeros(len(cos), 2, dtype=dtype), torch.zeros(len(cos))
    ones[:, 0] = 1
    out = torch.empty_like(ones)
    library.rope(type_of(dtype), ones.data_ptr(), len(cos), 1, 2, 2, 1, cos.data_ptr(), zeros.data_ptr(), out.data_ptr(), 2, 2, 1)
    assert torch.equal(out[:, 0], cos.to(dtype))

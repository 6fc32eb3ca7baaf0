"""Ops `cpu` with weights of 8 and 4 bits: the products of the weights that `quantize` gives, computed in double precision, at every level.

Nothing is rounded but sums in fp32 and the result. A row has the same bits alone and in company, and with any number of threads.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from octavo.bench.resident import pages_of
from octavo.core.model import Ops
from octavo.core.native import absence, load
from octavo.core.quantization import Quantization, QuantizedWeight, quantize
from octavo.core.sampler import NOT_FINITE
from octavo.plugins.ops.cpu.ops import CpuOps
from octavo.plugins.ops.torch_ops.ops import TorchOps
from tests.plugins.ops.test_cpu import close, randn, shapes, strided


@pytest.fixture(params=["int8", "int4"])
def kind(request: pytest.FixtureRequest) -> Quantization:
    """Both."""
    return request.param  # type: ignore[no-any-return]


def exact(weight: torch.Tensor, kind: Quantization) -> torch.Tensor:
    """The weight that is computed with, in double precision."""
    quantized = quantize(weight, kind)
    if quantized.minima is None:
        return quantized.codes.double() * quantized.scales.double()
    scales, minima = (each.double().repeat_interleave(32, dim=1)[:, : weight.shape[1]] for each in (quantized.scales, quantized.minima))
    return quantized.codes.double() * scales + minima


def reach(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the terms of each sum amount to, for the error of summing: codes carry the sum of x along, by minimum or 16 scales."""
    return x.double().abs() @ weight.double().abs().amax(dim=1).expand(x.shape[1], -1)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_linears(ops: CpuOps, kind: Quantization, threads: Callable[[int], None], num_threads: int) -> None:
    """linear, linear_add and swiglu of whole and cut chunks, panels and tiles, with and without biases; what surrounds a result stays."""
    threads(num_threads)
    dtype = ops.dtype
    for seed, (rows, k, n) in enumerate([*shapes(12, seed=num_threads), (131, 33, 50), (1, 97, 200), (2, 576, 60), (4, 70, 30)]):
        x = strided(rows, k, seed=seed, dtype=dtype)
        weight, up = (randn(n, k, seed=seed + s, dtype=dtype) / k**0.5 for s in (1, 2))
        bias, up_bias = (randn(n, seed=seed + s, dtype=dtype) for s in (3, 4)) if seed % 2 else (None, None)
        packed = ops.pack(weight, bias, quantization=kind)
        expected = F.linear(x.double(), exact(weight, kind), None if bias is None else bias.double())
        close(ops.linear(x, packed), expected, reach(x, weight))
        residual = strided(rows, n, seed=seed + 5, dtype=dtype)
        surroundings, total = residual._base, residual.double() + expected
        assert ops.linear_add(x, packed, residual) is residual
        close(residual, total, reach(x, weight))
        assert surroundings is not None
        assert int(surroundings.isnan().sum()) == surroundings.numel() - rows * n
        gated = ops.swiglu(x, ops.pack_gate_up(weight, up, gate_bias=bias, up_bias=up_bias, quantization=kind))
        other = F.linear(x.double(), exact(up, kind), None if up_bias is None else up_bias.double())
        close(gated, F.silu(expected) * other, (1 + reach(x, weight)) * (1 + reach(x, up)))


def every_op(ops: CpuOps, kind: Quantization) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Each op with packed weights as a function of x [rows, 65]: with tails in every dimension."""
    k, heads, kv_heads, size, dtype = 65, 3, 1, 10, ops.dtype
    pack = [ops.pack(randn(n, width, seed=n, dtype=dtype), quantization=kind) for n, width in ((100, k), (k, k), (k, 77), (50, k))]
    weight, square, down, qkv = pack
    gate_up = ops.pack_gate_up(randn(77, k, seed=4, dtype=dtype), randn(77, k, seed=5, dtype=dtype), quantization=kind)
    norm = randn(k, seed=8, dtype=dtype)
    norms: dict[str, Any] = {"q_norm": randn(size, seed=9, dtype=dtype), "k_norm": randn(size, seed=10, dtype=dtype)}

    def inputs(x: torch.Tensor) -> torch.Tensor:
        angles = x[:, :5].float()
        parts = ops.attention_inputs(x, qkv, norm=norm, eps=1e-5, heads=(heads, kv_heads), cos=angles.cos(), sin=angles.sin(), **norms)
        return torch.cat(parts, dim=1).flatten(1)

    return {
        "linear": lambda x: ops.linear(x, weight),
        "linear_add": lambda x: ops.linear_add(x, square, x.clone()),
        "swiglu": lambda x: ops.swiglu(x, gate_up),
        "argmax": lambda x: ops.argmax(x, weight),
        "attention_outputs": lambda x: ops.attention_outputs(x, x.clone(), out=square, norm=norm, eps=1e-5, gate_up=gate_up, down=down),
        "attention_inputs": inputs,
    }


def test_a_row_depends_on_nothing_but_itself(ops: CpuOps, kind: Quantization, threads: Callable[[int], None]) -> None:
    """Taken apart in registers or in a buffer, in one block of tiles or many, on any number of threads, beside NaN: the same bits."""
    x = randn(150, 65, seed=0, dtype=ops.dtype)
    for name, op in every_op(ops, kind).items():
        threads(1)
        whole = op(x)
        for number in (1, 2, 5):
            threads(number)
            assert torch.equal(op(x), whole), (name, number)
            for first, last in ((0, 1), (149, 150), (5, 7), (5, 8), (5, 9), (5, 13), (5, 14), (1, 66), (1, 100)):
                assert torch.equal(op(x[first:last].contiguous()), whole[first:last]), (name, number, first, last)
        company = x.clone()
        company[::2] = torch.nan
        assert torch.equal(op(company)[1::2], whole[1::2]), name


def test_blocks_are_their_parts(ops: CpuOps, kind: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused blocks have the bits of the plain ops in a row."""
    x, names = randn(13, 65, seed=0, dtype=ops.dtype), ("attention_outputs", "attention_inputs")
    fused = {name: every_op(ops, kind)[name](x) for name in names}
    for name in names:
        monkeypatch.setattr(CpuOps, name, getattr(Ops, name))
    for name in names:
        assert torch.equal(every_op(ops, kind)[name](x), fused[name]), name


def test_argmax_is_that_of_the_logits(ops: CpuOps, kind: Quantization) -> None:
    """Ties too; NaN is no id."""
    for seed, (rows, k, n) in enumerate(shapes(12, seed=3)):
        x, packed = randn(rows, k, seed=seed, dtype=ops.dtype), ops.pack(randn(n, k, seed=seed + 1, dtype=ops.dtype), quantization=kind)
        assert torch.equal(ops.argmax(x, packed), ops.linear(x, packed).argmax(-1))
        assert ops.argmax(x * torch.nan, packed).tolist() == [NOT_FINITE] * rows


def test_rows_are_the_torch_ops_rows(ops: CpuOps, kind: Quantization) -> None:
    """An embedding out of the head is that of the dequantised weight: of int8 bit by bit, of int4 up to a rounding.

    scale * code + minimum may be rounded once or twice, as compilers see fit (torch's own differs where its vectors end): in fp32 that is
    2^-24 of a product of up to 8, and in 16 bits a value that lies between two others may go to the next one.
    """
    torch_ops = TorchOps()
    rounding = 0.0 if ops.dtype is torch.float32 else torch.finfo(ops.dtype).eps
    for n, k in ((1, 1), (96, 64), (101, 33), (50, 70)):
        weight, ids = randn(n, k, seed=n, dtype=ops.dtype), torch.arange(n).flip(0)
        found = ops.rows(ops.pack(weight, quantization=kind), ids)
        expected = torch_ops.rows(torch_ops.pack(weight, quantization=kind), ids)
        if kind == "int8":
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=rounding, atol=2.0**-21)
        assert len(ops.rows(ops.pack(weight, quantization=kind), ids[:0])) == 0


def test_no_rows_are_fine(ops: CpuOps, kind: Quantization) -> None:
    """A step may want no logits."""
    for name, op in every_op(ops, kind).items():
        assert len(op(torch.empty(0, 65, dtype=ops.dtype))) == 0, name


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 5)])  # int4: 4, and 16 + 16 for each group of 32
def test_bytes_are_those_of_the_codes(ops: CpuOps, kind: Quantization, bits: int) -> None:
    """Of whole panels and groups, with int8's scales of 4 bytes a row; biases count."""
    scales = 4 * 96 if kind == "int8" else 0
    assert ops.packed_bytes(ops.pack(randn(96, 64, seed=0, dtype=ops.dtype), quantization=kind)) == 96 * 64 * bits // 8 + scales
    biases = {"gate_bias": torch.zeros(96), "up_bias": torch.zeros(96)}
    gate_up = ops.pack_gate_up(*(randn(96, 64, seed=0, dtype=ops.dtype),) * 2, quantization=kind, **biases)
    assert ops.packed_bytes(gate_up) == 2 * (96 * 64 * bits // 8 + scales + 96 * 4)


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
@pytest.mark.parametrize(("kind", "share"), [("int8", 0.5), ("int4", 0.3125)])
def test_nothing_but_codes_stays(kind: Quantization, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight of 32 MiB of bf16: the original and what it was quantised to are freed, and no more than the codes is resident."""
    made: list[weakref.ref[torch.Tensor]] = []

    def noted(weight: torch.Tensor, kind: Quantization) -> QuantizedWeight:
        found = quantize(weight, kind)
        made.extend(weakref.ref(tensor) for tensor in (found.codes, found.scales, found.minima) if tensor is not None)
        return found

    monkeypatch.setattr("octavo.plugins.ops.cpu.packing.quantize", noted)
    ops, weight = CpuOps(load(), torch.bfloat16), torch.ones(4096, 4096, dtype=torch.bfloat16)
    made.append(weakref.ref(weight))
    packed = ops.pack(weight, quantization=kind)
    del weight
    gc.collect()
    assert len(made) >= 3 and all(tensor() is None for tensor in made)
    assert share * 2**25 <= packed.num_bytes <= 1.03 * share * 2**25
    chunk = torch.empty(0, dtype=torch.uint8).set_(packed.panels.untyped_storage())
    assert len(chunk) > packed.num_bytes + 2**23
    assert packed.num_bytes - 4096 <= pages_of(chunk) <= packed.num_bytes + 3 * 2**21  # huge pages at both ends

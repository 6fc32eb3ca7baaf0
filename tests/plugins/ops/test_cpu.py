"""The ops of the native library equal torch's formulas in double precision, rounded once, at every level of this processor.

Shapes are random and odd on purpose; a row has the same bits alone and in company, and with any number of threads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from octavo.core.errors import PluginContractError
from octavo.core.model import Ops
from octavo.core.native import absence, load
from octavo.core.sampler import NOT_FINITE, NOTHING_LEFT
from octavo.plugins.ops.cpu import CPU, octavo_ops
from octavo.plugins.ops.cpu.ops import CpuOps

ROUNDING = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # fp32: of a sum over k
needs_library = pytest.mark.skipif(absence() is not None, reason=str(absence()))


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(rows: int, size: int, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, size] as a slice of wider rows with NaN around it, at an odd address."""
    whole = torch.full((rows + 1, size + 3), torch.nan, dtype=dtype)
    whole[:rows, 1 : size + 1] = randn(rows, size, seed=seed, dtype=dtype)
    return whole[:rows, 1 : size + 1]


def close(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | float = 1.0) -> None:
    """Within one rounding of `expected` (double), and of sums whose terms have the size `scale`."""
    allowed = ROUNDING[found.dtype] * (expected.abs() + 0.01) + 2.0**-18 * torch.as_tensor(scale)
    excess = ((found.double() - expected).abs() - allowed).max()
    assert excess <= 0, f"off by {float(excess):.3g} more than rounding explains"


def shapes(count: int, *, seed: int) -> list[tuple[int, int, int]]:
    """(rows, k, n), among them whole panels and tiles, tails of every sort, and one of each."""
    rng = random.Random(seed)
    fixed = [(1, 1, 1), (1, 64, 48), (8, 96, 96), (16, 2, 12), (9, 33, 49), (3, 576, 960), (70, 40, 24)]
    return fixed + [(rng.choice([1, 2, 5, 7, 8, 9, 31, 65]), rng.randint(1, 130), rng.randint(1, 200)) for _ in range(count)]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_linears(ops: CpuOps, threads: Callable[[int], None], num_threads: int) -> None:
    """linear, linear_add and swiglu, with and without biases, of rows that lie apart; what surrounds a result stays."""
    threads(num_threads)
    dtype = ops.dtype
    for seed, (rows, k, n) in enumerate(shapes(12, seed=num_threads)):
        x = strided(rows, k, seed=seed, dtype=dtype)
        weight, up = (randn(n, k, seed=seed + s, dtype=dtype) / k**0.5 for s in (1, 2))
        bias, up_bias = (randn(n, seed=seed + s, dtype=dtype) for s in (3, 4)) if seed % 2 else (None, None)
        packed = ops.pack(weight, bias)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        close(ops.linear(x, packed), expected)
        residual = strided(rows, n, seed=seed + 5, dtype=dtype)
        surroundings = residual._base
        total = residual.double() + expected
        assert ops.linear_add(x, packed, residual) is residual
        close(residual, total)
        assert surroundings is not None
        assert int(surroundings.isnan().sum()) == surroundings.numel() - rows * n
        gated = ops.swiglu(x, ops.pack_gate_up(weight, up, gate_bias=bias, up_bias=up_bias))
        other = F.linear(x.double(), up.double(), None if up_bias is None else up_bias.double())
        close(gated, F.silu(expected) * other, 1 + expected.abs() + other.abs())


def test_gates_far_from_zero_are_shut_or_open(ops: CpuOps) -> None:
    """silu(x) x of -150 is next to 0 and of 150 x squared: exp neither overflows nor turns to NaN."""
    x = (20 * randn(5, 21, seed=0, dtype=torch.float32)).to(ops.dtype)
    x[0, 0], x[1, 0] = -150.0, 150.0
    unchanged = torch.eye(21, dtype=ops.dtype)
    gated = ops.swiglu(x, ops.pack_gate_up(unchanged, unchanged))
    assert abs(float(gated[0, 0])) < 1e-30 and gated[1, 0] == torch.tensor(22_500.0, dtype=ops.dtype)
    close(gated, F.silu(x.double()) * x.double())


def test_many_rows_and_few_panels_are_shared_out(ops: CpuOps, threads: Callable[[int], None]) -> None:
    """With more threads than panels, each takes a part of the rows; the result has the bits of one thread's."""
    dtype = ops.dtype
    x, packed = randn(300, 40, seed=0, dtype=dtype), ops.pack(randn(20, 40, seed=1, dtype=dtype))
    threads(1)
    alone, best = ops.linear(x, packed), ops.argmax(x, packed)
    for number in (2, 3, 7):
        threads(number)
        assert torch.equal(ops.linear(x, packed), alone)
        assert torch.equal(ops.argmax(x, packed), best)


def every_op(ops: CpuOps, dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Each op as a function of x [rows, 65]: with tails in every dimension."""
    k, heads, kv_heads, size = 65, 3, 1, 10
    weight = ops.pack(randn(100, k, seed=1, dtype=dtype), randn(100, seed=2, dtype=dtype))
    square = ops.pack(randn(k, k, seed=3, dtype=dtype))
    gate_up = ops.pack_gate_up(randn(77, k, seed=4, dtype=dtype), randn(77, k, seed=5, dtype=dtype))
    down = ops.pack(randn(k, 77, seed=6, dtype=dtype))
    qkv = ops.pack(randn((heads + 2 * kv_heads) * size, k, seed=7, dtype=dtype))
    norm, head_norm = randn(k, seed=8, dtype=dtype), randn(size, seed=9, dtype=dtype)
    back = ops.pack(randn(k, 60, seed=10, dtype=dtype), randn(k, seed=11, dtype=dtype))
    after: dict[str, Any] = {"out": back, "norm": norm, "eps": 1e-5, "gate_up": gate_up, "down": down}

    def inputs(x: torch.Tensor, with_norms: bool) -> torch.Tensor:
        angles = x[:, :5].float()
        norms: dict[str, Any] = {"q_norm": head_norm if with_norms else None, "k_norm": head_norm if with_norms else None}
        parts = ops.attention_inputs(x, qkv, norm=norm, eps=1e-5, heads=(heads, kv_heads), cos=angles.cos(), sin=angles.sin(), **norms)
        return torch.cat(parts, dim=1).flatten(1)

    return {
        "linear": lambda x: ops.linear(x, weight),
        "linear_add": lambda x: ops.linear_add(x, square, x.clone()),
        "swiglu": lambda x: ops.swiglu(x, gate_up),
        "rms_norm": lambda x: ops.rms_norm(x, norm, 1e-5),
        "rope": lambda x: ops.rope(x[:, :60].unflatten(1, (6, 10)), x[:, :5].float().cos(), x[:, :5].float().sin()).flatten(1),
        "argmax": lambda x: ops.argmax(x, weight),
        "attention_outputs": lambda x: ops.attention_outputs(x[:, :60].unflatten(1, (6, 10)), x.clone(), **after),
        "attention_inputs": lambda x: inputs(x, False),
        "attention_inputs with norms": lambda x: inputs(x, True),
    }


def test_a_row_depends_on_nothing_but_itself(ops: CpuOps, threads: Callable[[int], None]) -> None:
    """Alone, in any company (of NaN too), on any number of threads: the same bits."""
    x = randn(37, 65, seed=0, dtype=ops.dtype)
    for name, op in every_op(ops, ops.dtype).items():
        threads(1)
        whole = op(x)
        for number in (2, 5):
            threads(number)
            assert torch.equal(op(x), whole), (name, number)
            for first, last in ((0, 1), (36, 37), (5, 14), (1, 33)):
                assert torch.equal(op(x[first:last].contiguous()), whole[first:last]), (name, number, first, last)
        company = x.clone()
        company[::2] = torch.nan
        assert torch.equal(op(company)[1::2], whole[1::2]), name


def test_long_steps_are_computed_in_slabs(ops: CpuOps, threads: Callable[[int], None]) -> None:
    """Rows on both sides of the cuts have the bits that they have alone."""
    threads(2)
    x = randn(1030, 65, seed=0, dtype=ops.dtype)
    for name, op in every_op(ops, ops.dtype).items():
        whole = op(x)
        assert len(whole) == 1030
        for first, last in ((0, 3), (510, 515), (1022, 1026), (1029, 1030)):
            assert torch.equal(op(x[first:last].contiguous()), whole[first:last]), (name, first, last)


def test_a_projection_serves_more_than_one_layer(ops: CpuOps) -> None:
    """What is kept of a layer is made anew for other norms, sizes of heads, and angles of another length."""
    dtype = ops.dtype
    x, shared = randn(3, 20, seed=0, dtype=dtype), randn(24, 20, seed=1, dtype=dtype)
    packed, angles = ops.pack(shared), randn(3, 4, seed=2, dtype=torch.float32)
    first, second = (randn(20, seed=seed, dtype=dtype) for seed in (3, 4))
    heads = randn(8, seed=5, dtype=dtype)
    calls: list[dict[str, Any]] = [
        {"norm": first, "heads": (1, 1), "q_norm": None, "k_norm": None, "eps": 1e-5},
        {"norm": second, "heads": (1, 1), "q_norm": None, "k_norm": None, "eps": 1e-5},
        {"norm": second, "heads": (1, 1), "q_norm": heads, "k_norm": heads, "eps": 1e-5},
        {"norm": second, "heads": (1, 1), "q_norm": heads, "k_norm": heads, "eps": 1.0},
        {"norm": second, "heads": (2, 2), "q_norm": None, "k_norm": None, "eps": 1.0},
    ]
    for given in calls * 2:
        half = 24 // (given["heads"][0] + 2 * given["heads"][1]) // 2
        cos, sin = angles[:, :half].cos(), angles[:, :half].sin()
        found = ops.attention_inputs(x, packed, cos=cos.contiguous(), sin=sin.contiguous(), **given)
        alone = ops.attention_inputs(x, ops.pack(shared), cos=cos.contiguous(), sin=sin.contiguous(), **given)
        assert all(map(torch.equal, found, alone))


def test_blocks_are_their_parts(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused blocks have the bits of the plain ops in a row: each part rounds what it hands on."""
    dtype = ops.dtype
    x = randn(13, 65, seed=0, dtype=dtype)
    names = ("attention_outputs", "attention_inputs", "attention_inputs with norms")
    fused = {name: every_op(ops, dtype)[name](x) for name in names}
    for name in ("attention_outputs", "attention_inputs"):
        monkeypatch.setattr(CpuOps, name, getattr(Ops, name))
    for name in names:
        assert torch.equal(every_op(ops, dtype)[name](x), fused[name]), name


def test_norm_and_rope_of_views(ops: CpuOps) -> None:
    """Heads out of a fused projection, and a plain row."""
    dtype = ops.dtype
    fused = randn(7, 5, 16, seed=0, dtype=dtype)
    weight, angles = randn(16, seed=1, dtype=dtype), randn(7, 8, seed=2, dtype=torch.float32) * 10
    x = fused[:, 1:4]
    close(ops.rms_norm(x, weight, 1e-6), F.rms_norm(x.double(), (16,), weight.double(), 1e-6))
    close(ops.rms_norm(fused[0, 0], weight, 1e-6), F.rms_norm(fused[0, 0].double(), (16,), weight.double(), 1e-6))
    (a, b), cos, sin = x.double().chunk(2, dim=-1), angles.cos(), angles.sin()
    c, s = cos.double()[:, None], sin.double()[:, None]
    close(ops.rope(x, cos, sin), torch.cat([a * c - b * s, b * c + a * s], dim=-1))


def test_argmax_is_that_of_the_logits(ops: CpuOps) -> None:
    """Ties after rounding too, which in 16 bits are many; the lowest id wins, wherever the others are."""
    dtype = ops.dtype
    for seed, (rows, k, n) in enumerate(shapes(25, seed=3)):
        x, packed = randn(rows, k, seed=seed, dtype=dtype), ops.pack(randn(n, k, seed=seed + 1, dtype=dtype))
        assert torch.equal(ops.argmax(x, packed), ops.linear(x, packed).argmax(-1))
    weight = torch.zeros(5000, 2, dtype=dtype)
    weight[[17, 4900], 0] = 1.0
    packed = ops.pack(weight)
    assert ops.argmax(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=dtype), packed).tolist() == [17, 0, 0]


def test_argmax_of_what_is_not_finite_is_no_id(ops: CpuOps, threads: Callable[[int], None]) -> None:
    """A NaN or infinity as the greatest, in any column, and rows with no logit above -infinity: as the sampling step has it."""
    dtype, n = ops.dtype, 101
    for column in (0, 1, 47, 48, 99, 100):
        weight = torch.zeros(n, 3, dtype=dtype)
        weight[column, 0], weight[column, 1] = torch.nan, torch.inf
        weight[column + 1 - 2 * (column == 100), 2] = 1.0
        for number in (1, 3):
            threads(number)
            for chosen, expected in ((0, NOT_FINITE), (1, NOT_FINITE)):
                one = ops.pack(weight[:, chosen : chosen + 1].contiguous())
                assert ops.argmax(torch.ones(9, 1, dtype=dtype), one).tolist() == [expected] * 9
            assert torch.equal(ops.argmax(torch.full((2, 3), torch.nan, dtype=dtype), ops.pack(weight)), torch.full((2,), NOT_FINITE))
    below = ops.pack(torch.zeros(n, 3, dtype=dtype), torch.full((n,), -torch.inf))
    assert ops.argmax(torch.ones(2, 3, dtype=dtype), below).tolist() == [NOTHING_LEFT] * 2


def test_no_rows_are_fine(ops: CpuOps) -> None:
    """A step may want no logits, the first step of a thread too."""
    for name, op in every_op(ops, ops.dtype).items():
        with ThreadPoolExecutor(1) as fresh:
            assert len(fresh.submit(op, torch.empty(0, 65, dtype=ops.dtype)).result(timeout=60)) == 0, name


def test_packing_replaces_the_weight(ops: CpuOps) -> None:
    """Rows come back exactly, from whole panels and the last one; bytes are those of the weight, padded to panels; the original may go."""
    dtype = ops.dtype
    for n, k in ((1, 1), (96, 64), (101, 33)):
        weight = randn(n, k, seed=0, dtype=dtype)
        packed, ids = ops.pack(weight), torch.arange(n).flip(0)
        kept = weight.clone()
        weight.zero_()
        assert torch.equal(ops.rows(packed, ids), kept.flip(0))
        assert torch.equal(ops.rows(packed, ids[:0]), kept[:0])
    assert ops.packed_bytes(ops.pack(randn(96, 64, seed=0, dtype=dtype))) == 96 * 64 * dtype.itemsize
    with_bias = ops.pack_gate_up(*(randn(96, 64, seed=0, dtype=dtype),) * 2, gate_bias=torch.zeros(96), up_bias=torch.zeros(96))
    assert ops.packed_bytes(with_bias) == 2 * 96 * (64 * dtype.itemsize + 4)


@needs_library
def test_small_weights_share_chunks() -> None:
    """Of huge pages: pieces start at cache lines, do not overlap, and a large weight has a chunk of its own."""
    from octavo.plugins.ops.cpu.packing import Arena

    arena = Arena()
    pieces = [arena.take(size) for size in (1, 100, 64, 40 * 2**20, 5)]
    bounds = sorted((piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in pieces)
    assert [len(piece) for piece in pieces] == [1, 100, 64, 40 * 2**20, 5]
    assert all(start % 64 == 0 for start, _ in bounds)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))
    with pytest.raises(MemoryError, match=r"packed weights need 9223372036"):
        arena.take(2**63 - 2**24)


@needs_library
def test_what_does_not_suit_is_refused() -> None:
    """The library reads addresses: a wrong type, size, stride or id would read whatever lies there."""
    ops = CpuOps(load(), torch.bfloat16)
    packed = ops.pack(torch.zeros(6, 8, dtype=torch.bfloat16))
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    wanted = r"ops 'cpu': x must be torch.bfloat16 \[\*, 8\] on a CPU, its last dimension without gaps; the model gave "
    with pytest.raises(PluginContractError, match=wanted + r"torch.float32 on cpu, shape \[3, 8\], strides \[8, 1\]"):
        ops.linear(x.float(), packed)
    with pytest.raises(PluginContractError, match=wanted + r"torch.bfloat16 on cpu, shape \[3, 8\], strides \[1, 3\]"):
        ops.linear(x.t().contiguous().t(), packed)
    with pytest.raises(PluginContractError, match=wanted + r"torch.bfloat16 on cpu, shape \[3, 7\]"):
        ops.argmax(x[:, :7], packed)
    with pytest.raises(PluginContractError, match=r"ops 'cpu': residual must be torch.bfloat16 \[3, 6\] "):
        ops.linear_add(x, packed, x)
    with pytest.raises(PluginContractError, match=r"ops 'cpu': weight must be torch.bfloat16"):
        ops.pack(torch.zeros(6, 8))
    with pytest.raises(PluginContractError, match=r"ops 'cpu': norm must be torch.bfloat16 \[8\] "):
        ops.rms_norm(x, torch.zeros(9, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(PluginContractError, match=r"ops 'cpu': cos and sin must be torch.float32 \[3, 4\] on a CPU without gaps"):
        ops.rope(x.view(3, 1, 8), torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 4))
    for id_ in (-1, 6):
        with pytest.raises(IndexError, match=rf"ids {id_} to {id_} in a weight of 6 rows"):
            ops.rows(packed, torch.tensor([id_]))


@needs_library
def test_shapes_that_do_not_fit_are_refused() -> None:
    """Each would read or write beyond a tensor, or leave a part of a result unwritten."""
    ops = CpuOps(load(), torch.float32)
    x, ones = torch.zeros(3, 8), torch.ones(8)
    packed, gate_up, down = ops.pack(torch.zeros(6, 8)), ops.pack_gate_up(torch.zeros(5, 8), torch.zeros(5, 8)), ops.pack(torch.zeros(8, 5))
    angles: dict[str, Any] = {"cos": torch.zeros(3, 1), "sin": torch.zeros(3, 1)}
    inputs: dict[str, Any] = {"norm": ones, "eps": 1e-5, "q_norm": None, "k_norm": None, **angles}
    outputs: dict[str, Any] = {"out": ops.pack(torch.zeros(8, 8)), "norm": ones, "eps": 1e-5, "gate_up": gate_up, "down": down}
    refused: list[tuple[str, Callable[[], object]]] = [
        (r"residual must be torch.float32 \[3, 6\]", lambda: ops.linear_add(x, packed, torch.zeros(2, 6))),
        (r"rows of residual must not overlap", lambda: ops.linear_add(x, packed, torch.zeros(6).expand(3, 6))),
        (r"x must be torch.float32 \[\*, 8\]", lambda: ops.linear(torch.zeros(2, 3, 8), packed)),
        (r"x must be torch.float32 \[\*, 8\]", lambda: ops.argmax(torch.zeros(8), packed)),
        (r"x must be .* on a CPU.* gave torch.float32 on meta", lambda: ops.linear(x.to("meta"), packed)),
        (r"up must be torch.float32 \[5, 8\]", lambda: ops.pack_gate_up(torch.zeros(5, 8), torch.zeros(4, 8))),
        (r"up must be torch.float32 \[5, 8\]", lambda: ops.pack_gate_up(torch.zeros(5, 8), torch.zeros(5, 9))),
        (r"biases must be \[6\] each, all or none", lambda: ops.pack(torch.zeros(6, 8), torch.zeros(1))),
        (r"biases must be \[5\] each", lambda: ops.pack_gate_up(torch.zeros(5, 8), torch.zeros(5, 8), up_bias=torch.zeros(5))),
        (r"of one inner size; the model gave \[5, 8\] and \[6, 8\]", lambda: ops.attention_outputs(x, x, **{**outputs, "down": packed})),
        (r"attended must be torch.float32 \[3, 8\]", lambda: ops.attention_outputs(x[:2], x, **outputs)),
        (r"x must be torch.float32 \[\*, 8\]", lambda: ops.attention_outputs(x, x[:, :6], **outputs)),
        (r"wants a weight of pack;", lambda: ops.attention_outputs(x, x, **{**outputs, "out": gate_up})),
        (r"wants a weight of pack_gate_up", lambda: ops.swiglu(x, packed)),
        (r"wants a weight of pack_gate_up", lambda: ops.attention_outputs(x, x, **{**outputs, "gate_up": packed})),
        (r"wants a weight of pack;", lambda: ops.linear(x, gate_up)),
        (r"must have 2 \+ 2 \* 1 heads of one even size; .* 6 outputs", lambda: ops.attention_inputs(x, packed, heads=(2, 1), **inputs)),
        (r"must have 4 \+ 2 \* 1 heads of one even size", lambda: ops.attention_inputs(x, packed, heads=(4, 1), **inputs)),
        (r"heads must have an even size", lambda: ops.rope(torch.zeros(3, 1, 3), **angles)),
        (r"x must be torch.float32 \[\*, \*, \*\]", lambda: ops.rope(x, **angles)),
        (r"ids must be torch.int64 \[T\] on a CPU; .* gave torch.int32", lambda: ops.rows(packed, torch.zeros(3, dtype=torch.int32))),
        (r"ids must be torch.int64 \[T\] on a CPU", lambda: ops.rows(packed, torch.zeros(3, 1, dtype=torch.int64))),
    ]
    for message, call in refused:
        with pytest.raises(PluginContractError, match=message):
            call()


def test_the_input_may_be_the_residual(ops: CpuOps, threads: Callable[[int], None]) -> None:
    """Rows are not overwritten before all of them is read: the same bits as with a copy."""
    threads(2)
    x, packed = randn(70, 200, seed=0, dtype=ops.dtype), ops.pack(randn(200, 200, seed=1, dtype=ops.dtype))
    expected = ops.linear_add(x.clone(), packed, x.clone())
    same = x.clone()
    assert ops.linear_add(same, packed, same) is same
    assert torch.equal(same, expected)
    gate_up, down = ops.pack_gate_up(*(randn(200, 200, seed=seed, dtype=ops.dtype) for seed in (2, 3))), packed
    after: dict[str, Any] = {"out": packed, "norm": randn(200, seed=4, dtype=ops.dtype), "eps": 1e-5, "gate_up": gate_up, "down": down}
    expected = ops.attention_outputs(x.clone(), x.clone(), **after)
    assert torch.equal(ops.attention_outputs(x, x, **after), expected)
    shifted = randn(72, 200, seed=0, dtype=ops.dtype)
    expected = ops.linear_add(shifted[:70].clone(), packed, shifted[2:].clone())
    assert torch.equal(ops.linear_add(shifted[:70], packed, shifted[2:]), expected)


def test_the_descriptor_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the library; its absence is a reason, not an error."""
    from octavo.core.descriptors import Facts

    sizes = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_size_k": 8, "head_size_v": 8}
    facts = Facts(device="cpu", dtype="float32", kv_dtype="float32", **sizes)
    assert octavo_ops() == [CPU]
    assert set(CPU.needs(CPU.options(), facts)) == {"device:cpu"}
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", "/none.so")
    assert [reason[:30] for reason in CPU.rejects(CPU.options(), facts)] == ["needs the native library, but "]

"""All layers in one native call have the bits of the layers one by one, write the same cache, and refuse a kernel that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.core.attention import LayerSpec, StepAttention
from octavo.core.errors import PluginContractError
from octavo.core.model import Block, Ops
from octavo.core.native import load
from octavo.plugins.kernels.cpu_paged.kernel import CpuPagedKernel
from octavo.plugins.ops.cpu.ops import CpuOps
from tests.plugins.kernels.cases import Case, Spec, make_case
from tests.plugins.ops.test_cpu import randn

HEADS, SIZE, HIDDEN, INNER, LAYERS = (6, 2), 24, 65, 77, 3
ROWS = [(40, 1), (0, 7), (5, 600), (70, 1)]  # tokens computed before, and new: more than a slab


def model(ops: CpuOps, layers: int = LAYERS, **changes: Any) -> list[Block]:
    def packed(n: int, k: int, seed: int) -> Any:
        return ops.pack(randn(n, k, seed=seed, dtype=ops.dtype) / k**0.5, randn(n, seed=seed + 1, dtype=ops.dtype))

    def block(seed: int) -> Block:
        gate, up = (randn(INNER, HIDDEN, seed=seed + i, dtype=ops.dtype) / 8 for i in (5, 6))
        given: dict[str, Any] = {
            "input_norm": randn(HIDDEN, seed=seed, dtype=ops.dtype),
            "qkv": packed((HEADS[0] + 2 * HEADS[1]) * SIZE, HIDDEN, seed + 1),
            "q_norm": randn(SIZE, seed=seed + 2, dtype=ops.dtype),
            "k_norm": randn(SIZE, seed=seed + 3, dtype=ops.dtype),
            "out": packed(HIDDEN, HEADS[0] * SIZE, seed + 4),
            "mlp_norm": randn(HIDDEN, seed=seed + 7, dtype=ops.dtype),
            "gate_up": ops.pack_gate_up(gate, up),
            "down": packed(HIDDEN, INNER, seed + 8),
        }
        return Block(**given | changes)

    return [block(20 * index) for index in range(layers)]


def specs(**changes: Any) -> list[LayerSpec]:
    shape = {"num_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_size_k": SIZE, "head_size_v": SIZE, "scale": 0.2} | changes
    return [LayerSpec(index=index, window=(None, 9, None)[index], **shape) for index in range(LAYERS)]


def kernel_for(ops: CpuOps, **changes: Any) -> CpuPagedKernel:
    dtype = changes.pop("dtype", ops.dtype)
    return CpuPagedKernel(specs(**changes), dtype=dtype, device=torch.device("cpu"), library=ops._library)


def case_for(ops: CpuOps, layout: Any) -> Case:
    dtype = str(ops.dtype).removeprefix("torch.")
    return make_case(Spec(ratio=3, num_kv_heads=2, head_sizes=(SIZE, SIZE), dtype=dtype, layout=layout), ROWS)


def angles(tokens: int) -> dict[str, torch.Tensor]:
    turned = randn(tokens, SIZE // 2, seed=9, dtype=torch.float32)
    return {"cos": turned.cos(), "sin": turned.sin()}


@pytest.mark.parametrize("layout", ["region", 4])
def test_one_call_has_the_bits_of_many(ops: CpuOps, threads: Callable[[int], None], layout: Any) -> None:
    """Windows differ between layers; twice in a row, since what was bound is used again; then for another model's layers."""
    threads(2)
    case, kernel = case_for(ops, layout), kernel_for(ops)
    tokens = len(case.meta.slots)
    x = randn(tokens, HIDDEN, seed=1, dtype=ops.dtype)
    for layers in (model(ops), model(ops, q_norm=None, k_norm=None)):
        given: dict[str, Any] = {"heads": HEADS, "eps": 1e-5, **angles(tokens)}
        caches = [tuple(tensor.clone() for tensor in case.before) for _ in range(LAYERS)]
        one_by_one = StepAttention(kernel, caches, case.meta)
        expected = Ops.blocks(ops, x.clone(), layers, one_by_one, **given)
        assert expected[: case.live].isfinite().all() and not torch.equal(expected, x)
        for _ in range(2):
            found_in = [tuple(tensor.clone() for tensor in case.before) for _ in range(LAYERS)]
            found = ops.blocks(x.clone(), layers, StepAttention(kernel, found_in, case.meta), **given)
            assert torch.equal(found, expected)
            for pair in zip(found_in, caches, strict=True):
                for tensor, other in zip(*pair, strict=True):
                    torch.testing.assert_close(tensor, other, rtol=0, atol=0, equal_nan=True)


def test_it_is_one_call(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's kernel Python sees no layer; with another callback, or a kernel of another level, it sees each."""
    case, kernel, layers = case_for(ops, 4), kernel_for(ops), model(ops)
    tokens, seen = len(case.meta.slots), []
    x, given = randn(tokens, HIDDEN, seed=1, dtype=ops.dtype), {"heads": HEADS, "eps": 1e-5, **angles(len(case.meta.slots))}
    whole = CpuPagedKernel.write_and_attend

    def watched(self: CpuPagedKernel, *args: Any) -> torch.Tensor:
        seen.append(args[-1].index)
        return whole(self, *args)

    monkeypatch.setattr(CpuPagedKernel, "write_and_attend", watched)

    def step(given_kernel: CpuPagedKernel) -> StepAttention:
        return StepAttention(given_kernel, [tuple(tensor.clone() for tensor in case.before) for _ in range(LAYERS)], case.meta)

    expected = ops.blocks(x.clone(), layers, step(kernel), **given)
    assert seen == []
    attend = step(kernel)
    assert torch.equal(ops.blocks(x.clone(), layers, lambda *args: attend(*args), **given), expected)
    assert seen == [0, 1, 2]
    if ops._library.level != "plain":
        other = CpuPagedKernel(specs(), dtype=ops.dtype, device=torch.device("cpu"), library=load("plain"))
        ops.blocks(x.clone(), layers, step(other), **given)
        assert seen == [0, 1, 2] * 2


def test_a_kernel_that_does_not_fit_is_refused(ops: CpuOps) -> None:
    """The library reads addresses and checks nothing."""
    case = case_for(ops, 4)
    caches, tokens = [case.before] * LAYERS, len(case.meta.slots)
    x, given = randn(tokens, HIDDEN, seed=1, dtype=ops.dtype), {"heads": HEADS, "eps": 1e-5, **angles(tokens)}
    fitting, layers = StepAttention(kernel_for(ops), caches, case.meta), model(ops)
    for message, call in (
        ("the kernel .*12", lambda: ops.blocks(x, layers, StepAttention(kernel_for(ops, num_heads=12), caches, case.meta), **given)),
        (
            "the kernel .*in torch.float64",
            lambda: ops.blocks(x, layers, StepAttention(kernel_for_double(ops), caches, case.meta), **given),
        ),
        ("the model has 2 layers", lambda: ops.blocks(x, model(ops, layers=2), fitting, **given)),
        (rf"x must be .*\[{tokens}, {HIDDEN}\]", lambda: ops.blocks(x[1:], layers, fitting, **given)),
        ("cos and sin must be", lambda: ops.blocks(x, layers, fitting, **given | {"cos": given["cos"][1:]})),
        ("in all layers", lambda: ops.blocks(x, [*layers[:2], narrow(ops, layers[2])], fitting, **given)),
    ):
        with pytest.raises(PluginContractError, match=message):
            call()


def kernel_for_double(ops: CpuOps) -> CpuPagedKernel:
    kernel = kernel_for(ops)
    kernel.dtype = torch.float64
    return kernel


def narrow(ops: CpuOps, like: Block) -> Block:
    """A layer of another width than the others."""
    (other,) = model(ops, layers=1, qkv=ops.pack(randn((HEADS[0] + 2 * HEADS[1]) * SIZE, HIDDEN - 1, seed=1, dtype=ops.dtype)))
    return Block(**vars(like) | {"qkv": other.qkv, "input_norm": randn(HIDDEN - 1, seed=0, dtype=ops.dtype)})

"""What is particular to `cpu_paged`: every level of the processor, odd shapes and strides, and rows that depend on nothing else."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.core.attention import Kernel, LayerSpec
from octavo.core.errors import PluginContractError
from octavo.core.native import absence, load
from octavo.core.native.library import levels
from octavo.plugins.kernels.cpu_paged import CPU_PAGED
from octavo.plugins.kernels.cpu_paged.structures import Plan
from tests.plugins.kernels.cases import DTYPES, TOLERANCE, Case, Spec, Window, axes, facts, make_case

CASES = int(os.environ.get("OCTAVO_FUZZ_CASES", "400"))  # of all levels of this processor together
TASTE = 25  # cases of a test
EDGES = (1, 2, 15, 16, 17, 96, 97, 127, 128, 129, 255, 256, 257, 511, 513, 1023, 1025)  # where chunks, tiles and parts begin and end


def kernel_of(level: str, *layers: LayerSpec, dtype: str = "float32") -> Kernel:
    """The kernel at a level."""
    from octavo.plugins.kernels.cpu_paged.kernel import CpuPagedKernel

    return CpuPagedKernel(layers, dtype=getattr(torch, dtype), device=torch.device("cpu"), library=load(level))


def apart(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values as a view of a larger tensor, NaN between the rows and at an odd address."""
    rows, heads, size = tensor.shape
    before, gap = rng.randint(0, 2), rng.randint(0, 5)
    whole = torch.full((rows, heads + before, size + gap), torch.nan, dtype=tensor.dtype)
    view = whole[:, before:, gap - gap // 2 : gap - gap // 2 + size]
    view.copy_(tensor)
    return view


def random_case(rng: random.Random) -> Case:
    """Any layer, step and layout; lengths around the edges of chunks and tiles, now and then a long one."""
    chosen = {name: rng.choice(values) for name, values in axes(CPU_PAGED.provides).items()}
    if rng.random() < 0.5:
        chosen["head_sizes"] = (rng.randint(1, 160), rng.randint(1, 160))
    if rng.random() < 0.5:
        chosen["layout"] = rng.choice(("region", rng.randint(1, 300)))
    if rng.random() < 0.5:
        chosen["ratio"] = rng.randint(1, 12)
    spec = Spec(**chosen, num_kv_heads=rng.randint(1, 4), seed=rng.getrandbits(32))
    rows = None
    if rng.random() < 0.5:
        rows = []
        for _ in range(rng.randint(1, 3)):
            total = rng.choice(EDGES)
            new = 1 if rng.random() < 0.5 else rng.randint(1, min(total, 200))
            rows.append((total - new, new))
    case = make_case(spec, rows)
    q, k, v = (apart(tensor, rng) for tensor in (case.q, case.k, case.v))
    before, after = ((apart(tensors[0], rng), apart(tensors[1], rng)) for tensors in (case.before, case.after))
    return replace(case, q=q, k=k, v=v, before=before, after=after)


def check(level: str, case: Case) -> None:
    """Writes exactly the step's slots, and attends as the reference does: in one call, as an engine does it, and without the writing."""
    name = str(case.q.dtype).removeprefix("torch.")
    kernel = kernel_of(level, case.layer, dtype=name)
    prepared = kernel.prepare(case.meta)
    output = kernel.write_and_attend(case.q, case.k, case.v, case.before, case.meta, prepared, case.layer)
    for tensor, after in zip(case.before, case.after, strict=True):
        torch.testing.assert_close(tensor, after, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kernel.attend(case.q, case.before, case.meta, prepared, case.layer), output)
    assert output.dtype == case.q.dtype
    assert (output[case.live :] == 0).all()
    # The widest value of a head of one or two elements is no average: allow what rounding one value makes.
    torch.testing.assert_close(output[: case.live].float(), case.expected(), rtol=0, atol=TOLERANCE[name])


@pytest.mark.parametrize("batch", range(-(-CASES // TASTE // (1 if absence() else len(levels())))))
def test_equals_reference_at_random(level: str, batch: int, threads: Callable[[int], None]) -> None:
    """Random shapes, strides, tables, lengths and threads, NaN in every slot that is not the row's; `make fuzz` runs 10,000."""
    for index in range(TASTE):
        seed = f"{batch}-{index}"
        rng = random.Random(seed)
        threads(rng.randint(1, 3))
        try:
            check(level, random_case(rng))
        except AssertionError as error:
            raise AssertionError(f"case {seed!r} at level {level}: {error}") from error


ROWS = [(1299, 1), (0, 333), (255, 1), (2500, 5), (130, 70), (700, 1), (0, 1), (4095, 1), (90, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, "shorter"])
def test_rows_have_the_same_bits_in_any_company(level: str, dtype: str, window: Window, threads: Callable[[int], None]) -> None:
    """Alone or together, in any order, on one thread or three: contexts are cut by their own length, and merged in one order."""
    case = make_case(Spec(layout=16, ratio=3, num_kv_heads=2, head_sizes=(96, 80), window=window, dtype=dtype), ROWS)
    kernel = kernel_of(level, case.layer, dtype=dtype)
    threads(1)
    together = kernel.attend(case.q, case.after, case.meta, kernel.prepare(case.meta), case.layer)
    for number in (2, 3, 5):
        threads(number)
        again = kernel.attend(case.q, case.after, case.meta, kernel.prepare(case.meta), case.layer)
        assert torch.equal(again, together)
    for row, lengths in enumerate(ROWS):
        assert torch.equal(alone(kernel, case, row), of_row(case, row, together)), lengths


def of_row(case: Case, row: int, tensor: torch.Tensor) -> torch.Tensor:
    """What belongs to a row's tokens."""
    begin, end = case.meta.query_start[row : row + 2].tolist()
    return tensor[begin:end]


def alone(kernel: Kernel, case: Case, row: int) -> torch.Tensor:
    """What the row's tokens get in a step of their own."""
    q, slots = of_row(case, row, case.q), of_row(case, row, case.meta.slots)
    assert case.meta.block_table is not None
    meta = replace(
        case.meta,
        query_start=torch.tensor([0, len(slots)], dtype=torch.int32),
        seq_lens=case.meta.seq_lens[row : row + 1],
        slots=slots,
        block_table=case.meta.block_table[row : row + 1],
    )
    return kernel.attend(q, case.after, meta, kernel.prepare(meta), case.layer)


# Rows of a step, (computed, new), and how many blocks each has in common with the row before: parts of 256 and of 512 keys, several
# families, more rows than a tile holds, and families that a prompt or an empty row cuts.
Rows = tuple[tuple[int, int], ...]
FAMILIES: tuple[tuple[Rows, tuple[int, ...], dict[str, Any]], ...] = (
    (((299, 1), (699, 1), (519, 1), (599, 1), (39, 1)), (0, 17, 32, 32, 2), {}),
    (((1299, 1), (1289, 1), (1099, 1), (89, 1), (4499, 1), (4399, 1), (299, 1)), (0, 80, 64, 5, 0, 256, 16), {}),
    (((279, 1),) * 70, (0, *(17,) * 69), {}),
    (((599, 1), (520, 3), (520, 1), (0, 0), (599, 1), (515, 1)), (0, 32, 32, 0, 0, 32), {}),
    (((511, 1), (799, 1), (512, 1)), (0, 32, 32), {"ratio": 20}),
    (((767, 1), (800, 1), (779, 1)), (0, 32, 32), {"ratio": 16, "layout": 24}),
    (((1299, 1), (1199, 1), (1250, 1)), (0, 4, 3), {"ratio": 1, "layout": 300}),
)


def family(rows: Rows, common: tuple[int, ...], **options: Any) -> Case:
    """Rows that share their first blocks."""
    case = make_case(Spec(**{"layout": 16, "ratio": 3, "num_kv_heads": 2, "head_sizes": (40, 24), **options}), list(rows))
    table = case.meta.block_table
    assert table is not None
    for row, blocks in enumerate(common):
        table[row, :blocks] = table[row - 1, :blocks]
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, "shorter"])
@pytest.mark.parametrize(("rows", "common", "options"), FAMILIES)
def test_rows_that_share_blocks_have_the_bits_of_those_that_do_not(
    level: str,
    dtype: str,
    window: Window,
    rows: Rows,
    common: tuple[int, ...],
    options: dict[str, Any],
    threads: Callable[[int], None],
) -> None:
    """Where the processor has tiles, rows go through those of their common keys together: nobody's result shows it."""
    case = family(rows, common, dtype=dtype, window=window, sinks=True, softcap=20.0, **options)
    kernel = kernel_of(level, case.layer, dtype=dtype)
    threads(2)
    together = kernel.attend(case.q, case.after, case.meta, kernel.prepare(case.meta), case.layer)
    torch.testing.assert_close(together[: case.live].float(), case.expected(), rtol=0, atol=TOLERANCE[dtype])
    for row in range(len(rows)):
        assert torch.equal(alone(kernel, case, row), of_row(case, row, together)), row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rise", [2, 4, 20])
def test_scores_that_rise_from_tile_to_tile(level: str, dtype: str, rise: int) -> None:
    """By so many nats every 64 keys: what was summed is scaled down, some of it every time, some of it late, and in the next part too."""
    rows = [(0, 300), (1300, 5), (2199, 1), (400, 70)]
    case = make_case(Spec(layout=16, ratio=3, num_kv_heads=1, head_sizes=(32, 32), dtype=dtype), rows)
    table, k = case.meta.block_table, case.after[0]
    assert table is not None
    case.q[..., 0] = 4
    for row, (computed, new) in enumerate(rows):
        positions = torch.arange(computed + new)
        slots = table[row, positions // 16] * 16 + positions % 16
        k[slots, :, 0] = (rise * (positions // 64) / (4 * case.layer.scale)).to(k.dtype)[:, None]
    kernel = kernel_of(level, case.layer, dtype=dtype)
    found = kernel.attend(case.q, case.after, case.meta, kernel.prepare(case.meta), case.layer)
    # Scores up to 680: in fp32 they are off by 4e-5, and weights by as much.
    torch.testing.assert_close(found[: case.live].float(), case.expected(), rtol=0, atol=max(TOLERANCE[dtype], 3e-4))


def test_common_keys_are_computed_once(level: str) -> None:
    """70 rows of 280 positions, 272 of them common: 256 keys in two tiles of rows for each of two KV heads, and the rest of each row."""
    case = family(*FAMILIES[2][:2], dtype="bfloat16")
    kernel = kernel_of(level, case.layer, dtype="bfloat16")
    plans = [kept for kept in kernel.prepare(case.meta).kept if isinstance(kept, Plan)]
    once = level == "amx_bf16"
    assert [(plan.num_items, plan.num_merges) for plan in plans] == [(2 * 2 + 70 + 1, 70) if once else (70 + 1, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, "shorter"])
def test_a_prompt_has_the_same_bits_in_any_pieces(level: str, dtype: str, window: Window) -> None:
    """Of two tokens at least: tiles of keys and parts of contexts are cut by absolute position (a single token is decoded)."""
    total = 2300
    spec = Spec(layout=16, ratio=3, num_kv_heads=1, head_sizes=(32, 40), window=window, sinks=True, softcap=20.0, dtype=dtype)
    whole = make_case(spec, [(0, total)])
    kernel = kernel_of(level, whole.layer, dtype=dtype)
    expected = kernel.attend(whole.q, whole.after, whole.meta, kernel.prepare(whole.meta), whole.layer)
    for cuts in ((512, 1024, 1536, 2048), (1, 3, 5, 1030, 1093, 1100), (31, 2298), (1023,), (1025, 1100)):
        for begin, end in itertools.pairwise((0, *cuts, total)):
            if end - begin < 2:
                continue
            meta = replace(
                whole.meta,
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                slots=whole.meta.slots[begin:end],
                max_query_len=end - begin,
                max_seq_len=end,
                block_table=None if whole.meta.block_table is None else whole.meta.block_table[:1],
            )
            found = kernel.attend(whole.q[begin:end], whole.after, meta, kernel.prepare(meta), whole.layer)
            assert torch.equal(found, expected[begin:end]), (begin, end)


def test_writing_and_attending_in_one_call(level: str, threads: Callable[[int], None]) -> None:
    """Has the bits of the two calls, for few tokens and for many, on one thread and on more; and follows the cache that it is given."""
    for number, rows in itertools.product((1, 2, 3), ([(40, 1), (0, 7)], [(5, 900), (0, 300)])):
        threads(number)
        case = make_case(Spec(ratio=2, num_kv_heads=4), rows)
        kernel = kernel_of(level, case.layer)
        prepared = kernel.prepare(case.meta)
        expected = kernel.attend(case.q, case.after, case.meta, prepared, case.layer)
        for _ in range(2):
            cache = (case.before[0].clone(), case.before[1].clone())
            found = kernel.write_and_attend(case.q, case.k, case.v, cache, case.meta, prepared, case.layer)
            assert torch.equal(found, expected)
            for tensor, after in zip(cache, case.after, strict=True):
                torch.testing.assert_close(tensor, after, rtol=0, atol=0, equal_nan=True)
        k, v = case.k, case.v
        for name, wrong in (("q", (case.q[1:], k, v)), ("k", (case.q, k[:, 1:], v)), ("v", (case.q, k, v.double()))):
            with pytest.raises(PluginContractError, match=rf"{name} must be torch.float32"):
                kernel.write_and_attend(*wrong, case.before, case.meta, prepared, case.layer)


def test_refuses_what_it_cannot_read(level: str) -> None:
    """The library reads addresses and checks nothing, so the kernel does."""
    case = make_case(Spec())
    kernel = kernel_of(level, case.layer)
    prepared = kernel.prepare(case.meta)
    with pytest.raises(
        PluginContractError, match=r"kernel 'cpu_paged': q must be torch.float32 \[.*\] on a CPU; .* torch.float64 \[.*\] on cpu"
    ):
        kernel.attend(case.q.double(), case.after, case.meta, prepared, case.layer)
    with pytest.raises(PluginContractError, match=r"kernel 'cpu_paged': k must be torch.float32"):
        kernel.write_and_attend(case.q, case.k.half(), case.v, case.before, case.meta, prepared, case.layer)
    with pytest.raises(PluginContractError, match=r"neither region_starts nor block_table"):
        kernel.prepare(replace(case.meta, block_table=None))
    with pytest.raises(PluginContractError, match=r"seq_lens must be int32 on a CPU, not torch.int64 on cpu"):
        kernel.prepare(replace(case.meta, seq_lens=case.meta.seq_lens.long()))
    with pytest.raises(PluginContractError, match=r"slots must be torch.int64 \[T\] on a CPU, not torch.int32"):
        kernel.prepare(replace(case.meta, slots=case.meta.slots.int()))
    for q in (case.q[:-1], case.q[:, :-1], case.q[:, :, :-1], case.q.to("meta")):
        with pytest.raises(PluginContractError, match=r"q must be torch.float32 \[.*\] on a CPU"):
            kernel.attend(q, case.after, case.meta, prepared, case.layer)
    k, v = case.k, case.v
    for name, wrong in (("k", (k[1:], v)), ("k", (k[:, 1:], v)), ("k", (k[..., 1:], v)), ("v", (k, v[1:])), ("v", (k, v[..., 1:]))):
        with pytest.raises(PluginContractError, match=rf"{name} must be torch.float32 \[.*\] on a CPU"):
            kernel.write_and_attend(case.q, *wrong, case.before, case.meta, prepared, case.layer)


def test_copies_what_has_gaps_inside_a_head(level: str) -> None:
    """q, k and v whose last dimension is not dense are read all the same."""
    case = make_case(Spec())
    spread = [torch.stack((tensor, tensor), dim=-1).flatten(-2)[..., ::2] for tensor in (case.q, case.k, case.v)]
    assert all(tensor.stride(-1) == 2 for tensor in spread)
    check(level, replace(case, q=spread[0], k=spread[1], v=spread[2]))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_nan_is_not_hidden(level: str, softcap: float | None) -> None:
    """A query that is NaN gives NaN, with a soft cap too: a broken model shows."""
    case = make_case(Spec(softcap=softcap))
    kernel = kernel_of(level, case.layer)
    q = torch.full_like(case.q, torch.nan)
    assert kernel.attend(q, case.after, case.meta, kernel.prepare(case.meta), case.layer)[: case.live].isnan().all()


def test_says_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Without the native library, and in a type that it does not know."""
    options = CPU_PAGED.options()
    assert list(CPU_PAGED.rejects(options, facts("float64"))) == ["computes in float32, bfloat16, float16, not in float64"]
    assert list(CPU_PAGED.needs(options, facts())) == ["device:cpu"]
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", f"{tmp_path}/none.so")
    [reason] = CPU_PAGED.rejects(options, facts())
    assert reason.startswith("needs the native library, but OCTAVO_NATIVE_LIBRARY names")

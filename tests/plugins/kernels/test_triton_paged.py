"""What is particular to `triton_paged`: where it runs, its launches, its tiles. That it is right, `test_kernels` shows.

Where there is a GPU and TRITON_INTERPRET is not 1, the same tests run on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from octavo.core.compat import problems
from octavo.core.errors import ConfigError, IncompatibleStackError, PluginContractError
from octavo.core.stack import Choice, Stack
from octavo.core.testing.fake_plugins import fake_allocator, fake_model, fake_ops, fake_scheduler
from octavo.plugins.kernels.triton_paged import kernel as module
from octavo.plugins.kernels.triton_paged.kernel import Tile, TritonPagedKernel, tile_for
from tests.plugins.kernels.cases import (
    INTERPRETED,
    TOLERANCE,
    Case,
    Layout,
    Spec,
    build,
    facts,
    make_case,
    plugin,
    random_spec,
    run,
)

NAME = "triton_paged"


def check(case: Case, dtype: str = "float32") -> None:
    """The kernel equals the reference."""
    output = run(build(NAME, case.layer, dtype=dtype), case)
    assert output.isfinite().all()
    torch.testing.assert_close(output[: case.live].float(), case.expected(), rtol=0, atol=TOLERANCE[dtype])
    assert (output[case.live :] == 0).all()


class Launches:
    """Stands in for a function of `.attention_jit`: notes the grid of each launch, then launches."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        self.grids.append(grid)
        launch: Callable[..., Any] = self.function[grid]
        return launch


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches(module.attend_tiles)
    monkeypatch.setattr(module, "attend_tiles", launches)
    return launches


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches(module.write_slots)
    monkeypatch.setattr(module, "write_slots", launches)
    return launches


def test_needs_a_gpu_unless_interpreted() -> None:
    """By default the kernel asks for a GPU; told to interpret, it asks for nothing."""
    descriptor = plugin(NAME)
    assert list(descriptor.needs(descriptor.options(), facts())) == ["device:cuda"]
    assert list(descriptor.needs(descriptor.options(interpret=True), facts())) == []


def test_on_a_cpu_the_stack_says_what_is_missing() -> None:
    """The compatibility check names the GPU as what is missing, and nothing else."""
    others = {"scheduler": fake_scheduler(), "allocator": fake_allocator(), "ops": fake_ops(), "model": fake_model()}
    choices = {kind: Choice.default(descriptor) for kind, descriptor in others.items()}
    stack = Stack(**choices, kernel=Choice.default(plugin(NAME)))
    assert problems(stack, facts()) == ["kernel 'triton_paged' needs device:cuda, but device is cpu"]
    assert problems(stack, facts(device="cuda:1", capability=(9, 0))) == []


def test_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs, heads and systems that it cannot run with are refused, with what they would have to be."""
    descriptor = plugin(NAME)

    def rejections(**changes: Any) -> list[str]:
        return list(descriptor.rejects(descriptor.options(), facts("bfloat16", **changes)))

    assert rejections(device="cuda", capability=(8, 0), head_size_k=256) == []
    assert rejections(device="cuda", capability=(7, 5)) == ["Triton needs a GPU of compute capability 8.0 or newer, this one has 7.5"]
    assert rejections(head_size_v=512) == ["kernel 'triton_paged' has heads of up to 256 elements, the model's have 512"]
    monkeypatch.setattr("octavo.plugins.kernels.triton_paged.find_spec", lambda name: None if name == "triton" else find_spec(name))
    assert rejections() == ["Triton is not installed; it exists for Linux only: pip install triton"]


def test_too_large_heads_are_refused() -> None:
    """Also if the compatibility check was bypassed, or if one layer's heads are larger than the model says."""
    layer = replace(make_case(Spec()).layer, index=7, head_size_v=288)
    with pytest.raises(
        IncompatibleStackError,
        match=r"kernel 'triton_paged' has heads of up to 256 elements, layer 7 has 288; use kernel = \"naive\"",
    ):
        build(NAME, layer)


def test_the_interpreter_is_chosen_at_import() -> None:
    """A kernel that was to run the other way than Triton was imported for says how to start the process."""
    asked, made = ("false", "interpret") if INTERPRETED else ("true", "compile")
    text = f"kernel.interpret is {asked}, but Triton was imported to {made}: start the process with TRITON_INTERPRET={int(not INTERPRETED)}"
    with pytest.raises(ConfigError, match=f"^{text}$"):
        TritonPagedKernel([], dtype=torch.float32, device=torch.device("cpu"), interpret=not INTERPRETED)


def test_a_layout_is_needed() -> None:
    """Metadata without regions and without a block table break the interface's promise."""
    case = make_case(Spec())
    with pytest.raises(PluginContractError, match="has neither region_starts nor block_table; one of them must be set"):
        build(NAME, case.layer).prepare(replace(case.meta, block_table=None))


@pytest.mark.parametrize("layout", ["region", 4])
def test_one_launch_whatever_the_rows(layout: Layout, attends: Launches, writes: Launches) -> None:
    """Decoding rows, prompts and chunks share one launch of each function; nothing is gathered."""
    case = make_case(Spec(step="mixed", layout=layout))
    kernel = build(NAME, case.layer)
    run(kernel, case)
    assert (len(attends.grids), len(writes.grids)) == (1, 1)
    assert kernel.gathered_bytes == 0


@pytest.mark.parametrize("rows", [[(5, 1)] * 8, [(3, 4)] * 2])
def test_the_grid_follows_from_tokens_and_rows_alone(rows: list[tuple[int, int]], attends: Launches) -> None:
    """Contexts of any length have the same grid, and it holds no more than one tile a row and one in all beyond the full ones."""
    short = make_case(Spec(ratio=2), rows)
    long = make_case(Spec(ratio=2), [(computed + 150 * row, new) for row, (computed, new) in enumerate(rows)])
    for case in (short, long):
        check(case)
    assert attends.grids[0] == attends.grids[1]
    tiles, kv_heads = attends.grids[0]
    assert kv_heads == 2
    tile = tile_for(short.layer, torch.float32, decoding=short.meta.max_query_len == 1, interpret=INTERPRETED)
    assert tiles <= short.q.shape[0] // (tile.rows // 2) + short.meta.num_rows + 1


@pytest.mark.parametrize("tile", [Tile(16, 16, 4, 2), Tile(16, 64, 4, 2), Tile(32, 16, 8, 2), Tile(64, 32, 4, 2)], ids=str)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_tiles_of_every_shape(step: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that GPUs get, with more turns over the keys than the interpreter's, divide blocks and groups as they like."""
    monkeypatch.setattr(module, "_INTERPRETED", tile)
    monkeypatch.setattr(module, "_TILES", dict.fromkeys(module._TILES, (tile, tile)))
    rows = [(70, 1), (15, 1), (0, 1), (16, 1)] if step == "decode" else [(70, 1), (0, 33), (31, 17), (16, 1)]
    for spec in (Spec(layout=7, window="shorter", sinks=True), Spec(layout="region", ratio=8, num_kv_heads=1, softcap=2.0)):
        check(make_case(spec, rows))


@pytest.mark.parametrize("ratio", [5, 7, 17, 71])
def test_groups_that_fill_no_tile_evenly(ratio: int) -> None:
    """Groups that divide no power of two, and one that is larger than a tile (Falcon has 71 heads on one KV head)."""
    check(make_case(Spec(ratio=ratio, num_kv_heads=1), [(20, 1), (3, 9)]))


def test_block_size_is_any_integer() -> None:
    """Also larger than a tile's keys, and larger than the whole context."""
    for block_size in (3, 100, 1000):
        check(make_case(Spec(layout=block_size), [(0, 20), (90, 1), (101, 2)]))


def test_heads_that_do_not_follow_each_other() -> None:
    """q, k and v may be transposed views of [heads, tokens, size], and even of [tokens, size, heads]."""
    case = make_case(Spec(ratio=2), [(7, 3), (12, 1)])
    for axes in ((0, 1), (1, 2)):
        views = {name: getattr(case, name).transpose(*axes).contiguous().transpose(*axes) for name in ("q", "k", "v")}
        assert not views["q"].is_contiguous()
        check(replace(case, **views))


@pytest.mark.parametrize("head_sizes", [(256, 16), (16, 256)])
@pytest.mark.parametrize("layout", ["region", 16])
def test_slots_beyond_32_bits(layout: Layout, head_sizes: tuple[int, int]) -> None:
    """Elements of a cache with more than 2 ** 31 of them are written and read where they are, of K and of V."""
    case = make_case(Spec(layout="region", head_sizes=head_sizes, num_kv_heads=1, ratio=2, dtype="float16"), [(0, 5)])
    kernel = build(NAME, case.layer, dtype="float16")
    first = 2**31 // 256 + 16
    places = {"region_starts": None, "block_table": None}
    if layout == "region":
        places["region_starts"] = torch.tensor([first, 0], dtype=torch.int32)
    else:
        places["block_table"] = torch.tensor([[first // 16], [0]], dtype=torch.int32)
    meta = replace(case.meta, **places, block_size=16, slots=torch.tensor([*range(first, first + 5), -1]))
    big = replace(case, meta=meta).on(kernel.device)
    cache = tuple(torch.empty(first + 16, 1, size, dtype=torch.float16, device=kernel.device) for size in head_sizes)  # hardly touched
    prepared = kernel.prepare(big.meta)
    kernel.write(cache, big.k, big.v, big.meta, prepared)
    for tensor, values in zip(cache, (big.k, big.v), strict=True):
        assert torch.equal(tensor[first : first + 5], values[:5])
    output = kernel.attend(big.q, cache, big.meta, prepared, big.layer).cpu()
    torch.testing.assert_close(output[: case.live].float(), case.expected(), rtol=0, atol=TOLERANCE["float16"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_cases(seed: int) -> None:
    """Any combination of step, layout, heads, window, soft-cap, sinks and type."""
    spec = random_spec(random.Random(seed), provides=plugin(NAME).provides)
    check(make_case(spec), spec.dtype)

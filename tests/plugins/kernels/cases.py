"""Random attention cases, for every kernel: what a step looks like to a kernel, and the tokens' K and V that it must find.

A case spreads the K and V of each sequence over a pool by a mapping of its own, not by the code under test; all other slots hold NaN.
To have another kernel tested, add its name to KERNELS. Must not know: any kernel's class.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, Literal

import pytest
import torch

from octavo.core.attention import AttentionMetadata, Kernel, LayerSpec
from octavo.core.descriptors import Facts, KernelPlugin
from octavo.core.reference_attention import reference_attention

KERNELS = ("naive", "sdpa", "cpu_paged", "triton_paged")

# Kernels that need a GPU run on it, or, in a process with TRITON_INTERPRET=1, on the CPU (see tests/conftest.py).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPTIONS: dict[str, dict[str, Any]] = {"triton_paged": {"interpret": INTERPRETED}}

STEPS = ("decode", "prefill", "chunk", "mixed")
LAYOUTS: tuple[Layout, ...] = ("region", 1, 4, 7, 16)
RATIOS = (1, 2, 3, 4, 8)
HEAD_SIZES = ((64, 64), (80, 80), (128, 128), (80, 64), (24, 40))
WINDOWS: tuple[Window, ...] = (None, "one", "shorter", "equal", "longer")
DTYPES = ("float32", "bfloat16", "float16")

# Largest difference from fp32 attention over the same, already rounded, inputs: a few units in the last place of outputs that are below 4.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 2.5e-3}

Layout = Literal["region"] | int
Window = Literal["one", "shorter", "equal", "longer"] | None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a case is like. `layout`: regions, or blocks of that size. `window`: in relation to the longest sequence."""

    step: str = "mixed"
    layout: Layout = 4
    ratio: int = 3
    num_kv_heads: int = 2
    head_sizes: tuple[int, int] = (64, 64)
    window: Window = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One step. `before` and `after`: the cache without and with its tokens. The last row is empty and has one token, of slot -1."""

    layer: LayerSpec
    meta: AttentionMetadata
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    before: tuple[torch.Tensor, torch.Tensor]
    after: tuple[torch.Tensor, torch.Tensor]

    @property
    def live(self) -> int:
        """Tokens of rows that are not empty; they come first."""
        return int(self.meta.query_start[-2])

    def on(self, device: torch.device) -> Case:
        """The case with its tensors on a device."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        return Case(
            layer=replace(self.layer, sinks=moved(self.layer.sinks)),
            meta=replace(self.meta, **{field.name: moved(getattr(self.meta, field.name)) for field in fields(self.meta)}),
            q=moved(self.q),
            k=moved(self.k),
            v=moved(self.v),
            before=(moved(self.before[0]), moved(self.before[1])),
            after=(moved(self.after[0]), moved(self.after[1])),
        )

    def expected(self) -> torch.Tensor:
        """The reference's output for the live tokens, [live, H, Dv] in fp32, computed in fp64."""
        return reference_attention(self.q, self.after, self.meta, self.layer, dtype=torch.float64)[: self.live].float()


def plugin(name: str) -> KernelPlugin:
    """The descriptor of a built-in kernel."""
    (found,) = import_module(f"octavo.plugins.kernels.{name}").octavo_kernels()
    assert isinstance(found, KernelPlugin)
    return found


def facts(dtype: str = "float32", **changes: Any) -> Facts:
    """Facts of a CPU and of a model of that dtype."""
    facts = Facts(device="cpu", dtype=dtype, kv_dtype=dtype, num_layers=1, num_heads=6, num_kv_heads=2, head_size_k=64, head_size_v=64)
    return replace(facts, **changes)


def build(name: str, *layers: LayerSpec, dtype: str = "float32", **options: Any) -> Kernel:
    """A kernel as the engine builds it, on a device that it runs on; skips the test if there is none."""
    descriptor = plugin(name)
    chosen = descriptor.options(**OPTIONS.get(name, {}) | options)
    device = "cuda" if "device:cuda" in descriptor.needs(chosen, facts(dtype)) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"kernel {name!r} needs a GPU, and torch finds none; set TRITON_INTERPRET=1 to have it interpreted")
    return descriptor.build(chosen, layers, facts(dtype, device=device))


def run(kernel: Kernel, case: Case) -> torch.Tensor:
    """Write and attend on a copy of the cache -> [T, H, Dv], on the CPU; checks that exactly the step's slots were written."""
    case = case.on(kernel.device)
    cache = tuple(tensor.clone() for tensor in case.before)
    prepared = kernel.prepare(case.meta)
    kernel.write(cache, case.k, case.v, case.meta, prepared)
    output = kernel.attend(case.q, cache, case.meta, prepared, case.layer)
    for tensor, after in zip(cache, case.after, strict=True):
        torch.testing.assert_close(tensor, after, rtol=0, atol=0, equal_nan=True)
    return output.cpu()


def attend(kernel: Kernel, case: Case, prepared: Any = None) -> torch.Tensor:
    """Attend alone, over the cache with the step's tokens -> [T, H, Dv], on the CPU; `prepared` is made where it is None."""
    case = case.on(kernel.device)
    prepared = kernel.prepare(case.meta) if prepared is None else prepared
    return kernel.attend(case.q, case.after, case.meta, prepared, case.layer).cpu()


def lengths(step: str, rng: random.Random) -> list[tuple[int, int]]:
    """(computed before, new tokens) of each row of such a step; odd and even, from one token to some dozens."""
    decode = [(rng.randint(0, 70), 1) for _ in range(6)]
    prefill = [(0, rng.choice((2, 3, 5, 16, 17, 31, 40))) for _ in range(3)]
    chunk = [(rng.randint(1, 40), rng.choice((2, 5, 7, 16, 23))) for _ in range(3)]
    mixed = decode[:3] + prefill[:2] + chunk[:2] + [(33, 1)]
    rows = {"decode": decode, "prefill": prefill, "chunk": chunk, "mixed": mixed}[step]
    rng.shuffle(rows)
    return rows


def make_case(spec: Spec, rows: list[tuple[int, int]] | None = None) -> Case:
    """The case of a spec, the same each time; `rows`, (computed, new) each, replaces the lengths that the seed would choose."""
    rng = random.Random(repr(spec))
    random_tensor = torch.Generator().manual_seed(rng.getrandbits(32))
    rows = lengths(spec.step, rng) if rows is None else rows
    totals = [computed + new for computed, new in rows]
    longest = max(totals, default=0)
    dtype = getattr(torch, spec.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random_tensor).to(dtype)

    num_heads = spec.num_kv_heads * spec.ratio
    head_size_k, head_size_v = spec.head_sizes
    # Scores with a standard deviation of 2 and a cap that bends them: no head looks everywhere alike.
    layer = LayerSpec(
        index=0,
        num_heads=num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size_k=head_size_k,
        head_size_v=head_size_v,
        scale=2 * head_size_k**-0.5,
        window={None: None, "one": 1, "shorter": max(2, longest // 3), "equal": longest, "longer": longest + 9}[spec.window],
        softcap=spec.softcap,
        sinks=torch.randn(num_heads, generator=random_tensor) if spec.sinks else None,
    )
    slots, layout, num_slots = place(totals, spec.layout, rng)
    before = (
        torch.full((num_slots, spec.num_kv_heads, head_size_k), torch.nan, dtype=dtype),
        torch.full((num_slots, spec.num_kv_heads, head_size_v), torch.nan, dtype=dtype),
    )
    for (computed, _), row_slots in zip(rows, slots, strict=True):
        for tensor in before:
            tensor[row_slots[:computed]] = normal(computed, *tensor.shape[1:])
    new_slots = [slot for (computed, _), row_slots in zip(rows, slots, strict=True) for slot in row_slots[computed:]]
    k, v = (normal(len(new_slots) + 1, *tensor.shape[1:]) for tensor in before)
    after = tuple(tensor.clone() for tensor in before)
    for tensor, values in zip(after, (k, v), strict=True):
        tensor[new_slots] = values[:-1]
    news = [new for _, new in rows] + [1]
    meta = AttentionMetadata(
        query_start=torch.tensor([sum(news[:i]) for i in range(len(news) + 1)], dtype=torch.int32),
        seq_lens=torch.tensor([*totals, 0], dtype=torch.int32),
        slots=torch.tensor([*new_slots, -1], dtype=torch.int64),
        max_query_len=max(news),
        max_seq_len=longest,
        **layout,
    )
    q = normal(len(new_slots) + 1, num_heads, head_size_k)
    return Case(layer=layer, meta=meta, q=q, k=k, v=v, before=before, after=(after[0], after[1]))


def place(totals: list[int], layout: Layout, rng: random.Random) -> tuple[list[list[int]], dict[str, Any], int]:
    """Give each sequence its slots, with gaps -> (slots of each row, the layout's fields of the metadata, slots of the pool).

    One more row, the empty one, gets an entry that points at somebody else's slots.
    """
    if layout == "region":
        starts, free = [0] * len(totals), rng.randint(1, 5)
        for row in rng.sample(range(len(totals)), len(totals)):
            starts[row] = free
            free += totals[row] + rng.randint(0, 5)
        slots = [[start + p for p in range(total)] for start, total in zip(starts, totals, strict=True)]
        return slots, {"region_starts": torch.tensor([*starts, 0], dtype=torch.int32)}, free + 3
    assert isinstance(layout, int)
    counts = [-(-total // layout) for total in totals]
    num_blocks = sum(counts) + 5
    blocks = rng.sample(range(num_blocks), num_blocks)
    if ordered := rng.random() < 0.3:  # blocks that follow each other, as in a fresh pool
        blocks.sort()
    width = max(counts, default=0) + 2
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    if ordered:
        tables = [sorted(table) for table in tables]
    slots = [[table[p // layout] * layout + p % layout for p in range(total)] for table, total in zip(tables, totals, strict=True)]
    padded = [table + [rng.randrange(num_blocks) for _ in range(width - len(table))] for table in [*tables, []]]
    return slots, {"block_table": torch.tensor(padded, dtype=torch.int32), "block_size": layout}, num_blocks * layout


def axes(provides: frozenset[str]) -> dict[str, list[Any]]:
    """The values of each field of Spec that a kernel with these capabilities is tested with."""
    return {
        "step": list(STEPS),
        "layout": [layout for layout in LAYOUTS if ("contiguous_kv" if layout == "region" else "paged_kv") in provides],
        "ratio": list(RATIOS),
        "head_sizes": list(HEAD_SIZES),
        "window": list(WINDOWS) if "window" in provides else [None],
        "softcap": [None, 2.0] if "softcap" in provides else [None],
        "sinks": [False, True] if "sinks" in provides else [False],
        "dtype": list(DTYPES),
    }


def random_spec(rng: random.Random, *, provides: frozenset[str]) -> Spec:
    """Any spec that a kernel with these capabilities must compute; for fuzzers."""
    chosen = {name: rng.choice(values) for name, values in axes(provides).items()}
    return Spec(**chosen, num_kv_heads=rng.choice((1, 2, 3)), seed=rng.getrandbits(32))

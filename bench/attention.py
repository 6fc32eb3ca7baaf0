"""Attention kernels of a CPU side by side, over one layer's cache: milliseconds of a step's attention, in alternation.

    python -m octavo.bench.attention [--kernels cpu_paged sdpa] [--seconds 3] [--case 64x256]

Heads and types are SmolLM2-135M's (9 query heads, 3 KV heads of 64, bf16) unless said otherwise. A case is one step: decoding rows
("64x256": 64 rows of 256 positions each) or a prompt ("256+1000": 256 queries after 1,000 positions). Each of `--layers` layers has a cache
of its own, so that none stays in the processor's caches, and blocks of 16 are dealt out at random. Times are medians, with the
metadata prepared once; GB/s counts K and V read once a row. A printed benchmark and no test: it depends on the machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import cast

import torch
from tqdm import tqdm

from octavo.bench.alternation import compare
from octavo.core.attention import AttentionMetadata, Kernel, LayerSpec
from octavo.core.descriptors import Facts, KernelPlugin
from octavo.core.errors import ConfigError
from octavo.core.kv_tensors import allocate_cache
from octavo.core.registry import Registry

BLOCK = 16
CASES = ("64x256", "64x1024", "8x4096", "1x4000", "256+1000", "4000+0")


@dataclass(frozen=True)
class Case:
    """`rows` rows of `new` queries each, after `computed` positions."""

    rows: int
    computed: int
    new: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read "64x256" or "256+1000". Raises ConfigError."""
        if found := re.fullmatch(r"(\d+)x(\d+)", text):
            return cls(int(found[1]), int(found[2]) - 1, 1)
        if found := re.fullmatch(r"(\d+)\+(\d+)", text):
            return cls(1, int(found[2]), int(found[1]))
        raise ConfigError(f'case {text!r}: write "ROWSxPOSITIONS" for decoding rows, or "QUERIES+BEFORE" for a prompt')

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self.computed + self.new

    def metadata(self) -> AttentionMetadata:
        """Blocks dealt out at random, the same each time."""
        blocks = -(-self.length // BLOCK)
        table = torch.randperm(self.rows * blocks, generator=torch.Generator().manual_seed(0)).view(self.rows, blocks).to(torch.int32)
        positions = torch.arange(self.computed, self.length)
        slots = table[:, positions // BLOCK].to(torch.int64) * BLOCK + positions % BLOCK
        return AttentionMetadata(
            query_start=torch.arange(0, self.rows * self.new + 1, self.new, dtype=torch.int32),
            seq_lens=torch.full((self.rows,), self.length, dtype=torch.int32),
            slots=slots.flatten(),
            max_query_len=self.new,
            max_seq_len=self.length,
            block_table=table,
            block_size=BLOCK,
        )


def layers_of(number: int, heads: int, kv_heads: int, size: int) -> tuple[LayerSpec, ...]:
    """Layers of one shape."""
    return tuple(
        LayerSpec(index=i, num_heads=heads, num_kv_heads=kv_heads, head_size_k=size, head_size_v=size, scale=size**-0.5)
        for i in range(number)
    )


def build(name: str, layers: tuple[LayerSpec, ...], dtype: str) -> Kernel:
    """The kernel on a CPU. Raises ConfigError with the reasons why it does not run here."""
    plugin = cast(KernelPlugin, Registry.discover().get("kernel", name))
    layer = layers[0]
    facts = Facts(
        device="cpu",
        dtype=dtype,
        kv_dtype=dtype,
        num_layers=len(layers),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size_k=layer.head_size_k,
        head_size_v=layer.head_size_v,
    )
    options = plugin.options()
    missing = [f"it needs {word}" for word in plugin.needs(options, facts) if word not in facts.provides]
    if reasons := [*missing, *plugin.rejects(options, facts)]:
        raise ConfigError(f"kernel {name!r} does not run here: {'; '.join(reasons)}")
    return plugin.build(options, layers, facts)


def step_of(kernel: Kernel, case: Case) -> Callable[[], None]:
    """One step's writes and attention in all layers."""
    layer, meta = kernel.layers[0], case.metadata()
    caches = allocate_cache(kernel, case.rows * -(-case.length // BLOCK) * BLOCK, kernel.device)
    generator = torch.Generator().manual_seed(0)
    for cache in caches:
        for tensor in cache:
            tensor.normal_(generator=generator)
    tokens, counts = case.rows * case.new, (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    fused = torch.randn(tokens, sum(counts), layer.head_size_k, generator=generator).to(kernel.dtype)
    q, k, v = fused.split(counts, dim=1)

    def step() -> None:
        prepared = kernel.prepare(meta)
        for spec, cache in zip(kernel.layers, caches, strict=True):
            kernel.write_and_attend(q, k, v, cache, meta, prepared, spec)

    return step


@torch.inference_mode()
def row(text: str, kernels: Seq[Kernel], names: Seq[str], *, seconds: float, rounds: int) -> str:
    """One line of the table."""
    case = Case.parse(text)
    ms = compare({name: step_of(kernel, case) for name, kernel in zip(names, kernels, strict=True)}, seconds=seconds, rounds=rounds)
    kernel = kernels[0]
    read = case.rows * case.length * sum(spec.bytes_per_slot for layer in kernel.layers for spec in kernel.cache_spec(layer))
    cells = [f"{ms[name]:.2f}" for name in names] + [f"{ms[name] / ms[names[0]]:.1f}" for name in names[1:]]
    speed = f"{read / ms[names[0]] / 1e6:.1f}" if case.new == 1 else ""
    return f"| {text} | {' | '.join(cells)} | {speed} |"


def main(argv: Seq[str] | None = None) -> int:
    """Print one line a case."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.attention", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", nargs="+", default=["cpu_paged", "sdpa"], help="ratios are those of the first to the others")
    parser.add_argument("--case", nargs="+", default=list(CASES), help=f"default: {' '.join(CASES)}")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=30, help="default: 30, as SmolLM2")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="of alternation, at least (default: 3)")
    args = parser.parse_args(argv)
    try:
        for text in args.case:
            Case.parse(text)
        layers = layers_of(args.layers, args.heads, args.kv_heads, args.head_size)
        kernels = [build(name, layers, args.dtype) for name in args.kernels]
    except ConfigError as error:
        parser.error(str(error))
    first = args.kernels[0]
    print(
        f"ms of {args.layers} layers in {args.dtype}, {args.heads} heads over {args.kv_heads} of {args.head_size}, "
        f"{torch.get_num_threads()} threads"
    )
    columns = ["case", *args.kernels, *(f"{name} : {first}" for name in args.kernels[1:]), f"{first} GB/s"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for text in tqdm(args.case, unit="case", disable=None):
        print(row(text, kernels, args.kernels, seconds=args.seconds, rounds=args.rounds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times all linears of a model, torch's `F.linear` against the native library's, in alternation: `python -m octavo.bench.native_linears`.

The shapes are SmolLM2-135M's: 30 layers and the head, 269 MB in bf16. Weights of each layer are their own, so they come from memory as in a
model. What is compared is what a greedy step needs: torch's side has gate and up joined, then SiLU and a product, a residual sum, and
argmax of the logits; ours fuses these.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import tqdm

from octavo.bench.alternation import compare
from octavo.core.model import Ops
from octavo.core.registry import Registry

HIDDEN, QKV, INNER, VOCABULARY, LAYERS = 576, 960, 1536, 49152, 30


@dataclass(frozen=True)
class Layer:
    """Packed weights of one layer."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any


def layers_of(ops: Ops, dtype: torch.dtype, layers: int) -> tuple[list[Layer], Any]:
    """Random weights, packed: the layers and the head."""
    generator = torch.Generator().manual_seed(0)

    def weight(out: int, inputs: int) -> torch.Tensor:
        return torch.randn(out, inputs, generator=generator).div_(inputs**0.5).to(dtype)

    def layer() -> Layer:
        return Layer(
            ops.pack(weight(QKV, HIDDEN)),
            ops.pack(weight(HIDDEN, HIDDEN)),
            ops.pack_gate_up(weight(INNER, HIDDEN), weight(INNER, HIDDEN)),
            ops.pack(weight(HIDDEN, INNER)),
        )

    return [layer() for _ in range(layers)], ops.pack(weight(VOCABULARY, HIDDEN))


def step_of(ops: Ops, dtype: torch.dtype, rows: int, layers: int) -> Callable[[], None]:
    """One step's linears over `rows` rows."""
    weights, head = layers_of(ops, dtype, layers)
    x = torch.randn(rows, HIDDEN).to(dtype)

    def step() -> None:
        for layer in weights:
            ops.linear(x, layer.qkv)
            residual = ops.linear_add(x, layer.out, torch.zeros_like(x))
            ops.linear_add(ops.swiglu(x, layer.gate_up), layer.down, residual)
        ops.argmax(x, head)

    return step


def plain_step_of(dtype: torch.dtype, rows: int, layers: int) -> Callable[[], None]:
    """The same products as bare `F.linear` calls, nothing fused and nothing added."""
    weights, head = layers_of(_ops("torch", dtype), dtype, layers)
    x, inner = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, INNER).to(dtype)

    def step() -> None:
        for layer in weights:
            for packed in (layer.qkv, layer.out, layer.gate_up):
                F.linear(x, packed.weight)
            F.linear(inner, layer.down.weight)
        F.linear(x, head.weight)

    return step


def _ops(name: str, dtype: torch.dtype) -> Ops:
    (plugin,) = (plugin for plugin in Registry.discover().descriptors("ops") if plugin.name == name)
    ops: Ops = plugin.build(plugin.options(), _Facts(str(dtype).removeprefix("torch.")))
    return ops


@dataclass(frozen=True)
class _Facts:
    """All that building ops asks of the facts."""

    dtype: str


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.native_linears", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="rows of a step (default: 1 8 64 256)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of weights and activations")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of rows (default: 5)")
    parser.add_argument("--rounds", type=int, default=5, help="of alternation, at least (default: 5)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model (default: 30)")
    asked = parser.parse_args(arguments)
    dtype = getattr(torch, asked.dtype)
    print(f"all linears of SmolLM2-135M in {asked.dtype}, {torch.get_num_threads()} threads, median ms of steps in alternation")
    print("| rows | F.linear alone | ops torch | ops cpu | F.linear : cpu | torch : cpu |\n|---|---|---|---|---|---|")
    for rows in tqdm(asked.rows, unit="size", disable=None):
        steps = {name: step_of(_ops(name, dtype), dtype, rows, asked.layers) for name in ("torch", "cpu")}
        steps["linear"] = plain_step_of(dtype, rows, asked.layers)
        ms = compare(steps, seconds=asked.seconds, rounds=asked.rounds)
        ratios = f"{ms['linear'] / ms['cpu']:.2f} | {ms['torch'] / ms['cpu']:.2f}"
        print(f"| {rows} | {ms['linear']:.1f} | {ms['torch']:.1f} | {ms['cpu']:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()

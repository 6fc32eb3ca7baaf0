"""How near a run's steps come to what the device can do: to its memory bandwidth, or to its arithmetic, whichever binds.

A step reads all weights and the KV of its context once, and computes two operations a weight and token (Williams et al., 2009). It can't
be faster than the longer of the two. Bandwidth and arithmetic are measured here, not read off a data sheet: what a loop in PyTorch
reaches on this device, with these threads. Layers with a window read less than is counted. Must not know: kernels, allocators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import torch

from octavo.bench.step_log import StepLine
from octavo.core.assembly import LoadedModel
from octavo.core.memory import BYTES_OF, kv_bytes_per_token

READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # far more than any cache holds
GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
MEASURE_S = 1.0  # for each of the two


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a device was seen to do."""

    bandwidth: float  # bytes a second, reading
    flops: float  # floating-point operations a second, in a large matrix product of `dtype`
    dtype: str

    @property
    def ridge_batch(self) -> float:
        """Tokens of a step from which on arithmetic binds: below, a larger batch is free."""
        return self.flops * BYTES_OF[self.dtype] / (2 * self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step has to read and write, and to compute."""

    num_bytes: float
    flops: float

    def seconds(self, limits: Limits) -> float:
        """The least that it can take."""
        return max(self.num_bytes / limits.bandwidth, self.flops / limits.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Of a model in a type: bytes and operations of its parts."""

    block_weights: int  # parameters of all layers, read in each step
    head_weights: int  # of the head, read where a token is drawn
    weight_bytes: float  # of one parameter, as the ops keep it
    kv_bytes: int  # of a token, in all layers
    flops_per_pair: int  # of a query and a key, in all layers

    def of(self, line: StepLine) -> StepCost:
        """A step's cost. Each row reads its whole context, whatever it shares."""
        parts = self.parts(line).values()
        return StepCost(num_bytes=sum(part.num_bytes for part in parts), flops=sum(part.flops for part in parts))

    def parts(self, line: StepLine) -> dict[str, StepCost]:
        """The same by part: `linears`, `head`, `attention`."""
        drawn = line.num_sampled + line.num_drafted
        return {
            "linears": StepCost(num_bytes=self.block_weights * self.weight_bytes, flops=2 * self.block_weights * line.num_tokens),
            "head": StepCost(num_bytes=(self.head_weights if drawn else 0) * self.weight_bytes, flops=2 * self.head_weights * drawn),
            "attention": StepCost(
                num_bytes=(line.num_context + line.num_tokens) * self.kv_bytes, flops=self.flops_per_pair * line.num_pairs
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineShare:
    """Of steps of one kind."""

    steps: int
    seconds: float  # their forward passes, head and sampling included
    least: float  # seconds that the device would need
    num_bytes: float
    flops: float
    memory_bound: int  # steps in which bandwidth binds

    @property
    def share(self) -> float:
        """Of the device's speed, reached. 0 without steps."""
        return self.least / self.seconds if self.seconds else 0.0


def cost_model(loaded: LoadedModel) -> CostModel:
    """Of a loaded model, from its weights and its shape."""
    shape, facts, num_bytes = loaded.model.shape, loaded.facts, loaded.model.weight_bytes()
    head = shape.vocab_size * shape.hidden_size
    parameters = shape.num_parameters or num_bytes // BYTES_OF[facts.dtype]
    return CostModel(
        block_weights=max(0, parameters - head * (1 if shape.tied_embeddings else 2)),
        head_weights=head,
        weight_bytes=num_bytes / parameters,
        kv_bytes=kv_bytes_per_token(shape, facts.kv_dtype),
        flops_per_pair=2 * shape.num_layers * shape.num_heads * (shape.head_size_k + shape.head_size_v),
    )


def roofline(steps: Iterable[StepLine], costs: CostModel, limits: Limits) -> dict[str, RooflineShare]:
    """By kind of step: `prompts`, which compute one or a piece of one, and `decode`, the others, guesses that they check included."""
    kinds: dict[str, list[StepLine]] = {"decode": [], "prompts": []}
    for line in steps:
        if line.num_rows and not line.error:
            kinds["prompts" if line.computes_prompt else "decode"].append(line)
    return {kind: _share(lines, costs, limits) for kind, lines in kinds.items() if lines}


def _share(lines: list[StepLine], costs: CostModel, limits: Limits) -> RooflineShare:
    found = [costs.of(line) for line in lines]
    return RooflineShare(
        steps=len(lines),
        seconds=sum(line.seconds.get("forward", 0.0) + line.seconds.get("sample", 0.0) for line in lines),
        least=sum(cost.seconds(limits) for cost in found),
        num_bytes=sum(cost.num_bytes for cost in found),
        flops=sum(cost.flops for cost in found),
        memory_bound=sum(cost.num_bytes / limits.bandwidth >= cost.flops / limits.flops for cost in found),
    )


def measure_limits(device: str, dtype: str) -> Limits:
    """Some two seconds of measuring, once in a process for a device, a type and a number of threads."""
    return _measured(device, dtype, torch.get_num_threads())


@cache
def _measured(device: str, dtype: str, threads: int) -> Limits:
    kind, wanted = torch.device(device).type, getattr(torch, dtype)
    block = torch.ones(READ_BYTES[kind] // 4, dtype=torch.float32, device=device)
    read = block.nbytes / _best(lambda: block.sum(), device)
    size = GEMM_SIZE[kind]
    one, other = (torch.ones(size, size, dtype=wanted, device=device) for _ in range(2))
    return Limits(bandwidth=read, flops=2 * size**3 / _best(lambda: one @ other, device), dtype=dtype)


def _best(call: Callable[[], object], device: str) -> float:
    """The least seconds that it took, of as many times as there is time for, at least three."""
    best, until, times = float("inf"), perf_counter() + MEASURE_S, 0
    while times < 3 or perf_counter() < until:
        begun = perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        best, times = min(best, perf_counter() - begun), times + 1
    return best

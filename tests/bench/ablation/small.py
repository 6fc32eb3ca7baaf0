"""A small ablation with a tiny model, and a kernel and ops that are wrong on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octavo.bench.ablation.spec import AblationSpec
from octavo.core.attention import AttentionMetadata, Kernel, LayerCache, LayerSpec
from octavo.core.descriptors import KernelPlugin
from octavo.core.registry import Registry
from octavo.plugins.ops.torch_ops import TORCH
from octavo.plugins.ops.torch_ops.ops import Linear, TorchOps
from tests.models import tiny

ENGINE = {"max_model_len": 64, "num_kv_slots": 128, "dtype": "float32", "device": "cpu"}
LADDER: dict[str, Any] = {
    "static": {"preset": "fastertransformer"},
    "continuous": {"parent": "static", "settings": {"scheduler": {"plugin": "continuous"}}},
    "paged": {"parent": "continuous", "settings": {"allocator": {"plugin": "paged"}}},
}
WORKLOAD = {"kind": "random", "count": 6, "input_len": 12, "output_len": 5, "range_ratio": 0.6}


def small_spec(cells: dict[str, Any] | None = None, *, engine: dict[str, Any] | None = None, **fields: Any) -> AblationSpec:
    """Two repeats of six requests, four at once."""
    return AblationSpec.model_validate(
        {
            "name": "small",
            "model": str(tiny("llama_gqa")),
            "repeats": 2,
            "settings": {"engine": ENGINE | (engine or {}), "scheduler": {"max_num_seqs": 4}},
            "scenarios": {"lengths": {"workload": WORKLOAD, "load": {"concurrency": 4}}},
            "cells": cells or LADDER,
            **fields,
        }
    )


class Distorted:
    """A kernel around another one that adds noise of a given size to what attention gives."""

    def __init__(self, inner: Kernel, noise: float) -> None:
        self._inner = inner
        self._noise = noise

    def build(self) -> Kernel:
        """The inner kernel with its `attend` replaced."""
        inner, attend, noise = self._inner, self._inner.attend, self._noise

        def distorted(q: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, prepared: Any, layer: LayerSpec) -> torch.Tensor:
            out = attend(q, cache, meta, prepared, layer)
            generator = torch.Generator().manual_seed(meta.max_seq_len)
            return out + noise * torch.randn(out.shape, generator=generator, dtype=out.dtype)

        inner.attend = distorted  # type: ignore[method-assign]
        return inner


class RoughOps(TorchOps):
    """Right in fp32; in fewer bits, what attention and MLP add is of any size."""

    def linear_add(self, x: torch.Tensor, packed: Linear, residual: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        if x.dtype is torch.float32:
            return super().linear_add(x, packed, residual)
        added = self.linear(x, packed)
        generator = torch.Generator().manual_seed(len(x))
        return residual.add_(added * (1 + 3.0 * torch.randn(added.shape, generator=generator, dtype=added.dtype)))


ROUGH = replace(TORCH, name="rough", build=lambda options, facts: RoughOps())


def registry(**noise: float) -> Registry:
    """The built-ins, ops `rough`, and a kernel of each name that distorts `sdpa` by so much."""
    found = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    sdpa = found.get("kernel", "sdpa")
    assert isinstance(sdpa, KernelPlugin)
    found.add(ROUGH)
    for name, size in noise.items():
        found.add(replace(sdpa, name=name, build=lambda *args, size=size: Distorted(sdpa.build(*args), size).build()))
    return found

"""A small ablation with a tiny model, and a kernel that is wrong on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octavo.bench.ablation.spec import AblationSpec
from octavo.core.attention import AttentionMetadata, Kernel, LayerCache, LayerSpec
from octavo.core.descriptors import KernelPlugin
from octavo.core.registry import Registry
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


def registry(**noise: float) -> Registry:
    """The built-ins, and a kernel of each name that distorts `sdpa` by so much."""
    found = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    sdpa = found.get("kernel", "sdpa")
    assert isinstance(sdpa, KernelPlugin)
    for name, size in noise.items():
        found.add(replace(sdpa, name=name, build=lambda *args, size=size: Distorted(sdpa.build(*args), size).build()))
    return found

"""Plugins that exist for a test only: descriptors that build nothing, and packages that look installed.

Must not know: pytest, any real plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.descriptors import AllocatorPlugin, KernelPlugin, ModelPlugin, ModelShape, OpsPlugin, SchedulerPlugin

TINY_CONFIG = {"architectures": ["TinyForCausalLM"]}


def write_package(folder: Path, name: str, version: str = "1.0", **modules: str) -> None:
    """Put a distribution with one entry point a module (of its name) into `folder`: installed where that is on sys.path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[octavo]\n" + "".join(f"{module} = {module}\n" for module in modules))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


def _no_build(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("a fake plugin builds nothing")


def fake_scheduler(name: str = "continuous", *, chunking: bool = False, **fields: Any) -> SchedulerPlugin:
    """A scheduler's description."""
    return SchedulerPlugin(name=name, summary="a fake scheduler", build=_no_build, chunking=chunking, **fields)


def fake_allocator(name: str = "paged", *, layout: Any = "block_table", **fields: Any) -> AllocatorPlugin:
    """An allocator's description."""
    return AllocatorPlugin(name=name, summary="a fake allocator", build=_no_build, layout=layout, **fields)


def fake_kernel(name: str = "naive", *, provides: frozenset[str] = frozenset({"contiguous_kv", "paged_kv"}), **fields: Any) -> KernelPlugin:
    """A kernel's description."""
    return KernelPlugin(name=name, summary="a fake kernel", build=_no_build, provides=provides, **fields)


def fake_ops(name: str = "torch", **fields: Any) -> OpsPlugin:
    """The description of layer operations."""
    return OpsPlugin(name=name, summary="fake ops", build=_no_build, **fields)


def fake_shape(**fields: Any) -> ModelShape:
    """Sizes of a tiny model."""
    sizes: dict[str, Any] = {
        "architecture": "TinyForCausalLM",
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size_k": 16,
        "head_size_v": 16,
        "windows": (None, None),
        "vocab_size": 100,
        "max_position_embeddings": 8192,
        "num_parameters": 10_000,
        "dtype": "bfloat16",
    }
    return ModelShape(**{**sizes, **fields})


def fake_model(
    name: str = "llama", *, architecture: str = "TinyForCausalLM", shape: ModelShape | None = None, **fields: Any
) -> ModelPlugin:
    """A model family's description; it accepts the one architecture."""

    def accepts(config: Mapping[str, Any]) -> str | None:
        return None if architecture in config["architectures"] else f"it runs {architecture} only"

    return ModelPlugin(
        name=name, summary="a fake model", build=_no_build, accepts=accepts, describe=lambda config: shape or fake_shape(), **fields
    )

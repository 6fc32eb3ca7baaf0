"""Model plugin `llama`: Llama, SmolLM, Mistral, Qwen2 and Qwen3 as one short model with fused weights.

Must not import torch at the top: listing plugins and describing a model read only this file and `config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from octavo.core.descriptors import Facts, ModelPlugin, ModelShape
from octavo.core.errors import ModelSourceError
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions
from octavo.plugins.models.llama.config import LlamaConfig, Unsupported

if TYPE_CHECKING:
    import torch

    from octavo.core.model import Model, Ops
    from octavo.core.sources import ModelSource


class LlamaOptions(PluginOptions):
    """The rest is in the model's config.json."""

    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="hold weights in int8 (one scale a row) or int4 (groups of 32, as GGUF's Q4_1; the head in int8); unset: in dtype",
    )


def _read(config: Mapping[str, Any]) -> LlamaConfig:
    try:
        return LlamaConfig.read(config)
    except Unsupported as why:
        raise ModelSourceError(f"model plugin 'llama' cannot run this model: {why}") from None


def accepts(config: Mapping[str, Any]) -> str | None:
    """None if this plugin runs a model with that config.json, else the reason why not."""
    try:
        LlamaConfig.read(config)
    except Unsupported as why:
        return str(why)
    return None


def describe(config: Mapping[str, Any]) -> ModelShape:
    """Sizes of the model with that config.json. Raises ModelSourceError where it isn't accepted."""
    return _read(config).shape


def build(
    source: ModelSource, options: LlamaOptions, ops: Ops, *, shard: tuple[int, int] = (0, 1), dtype: torch.dtype, device: torch.device
) -> Model:
    """Load the weights of `source` as `dtype` on `device`. Raises ModelSourceError: an unsupported config, bad or missing weights."""
    from octavo.plugins.models.llama.model import load

    return load(_read(source.config), source.path, ops, dtype=dtype, device=device, quantization=options.quantization)


def _needs(options: LlamaOptions, facts: Facts) -> Iterable[str]:
    return {None: (), "int8": ("weights:int8",), "int4": ("weights:int4", "weights:int8")}[options.quantization]


LLAMA = ModelPlugin(
    name="llama",
    summary="Llama, SmolLM, Mistral, Qwen2 and Qwen3, with fused weights",
    options=LlamaOptions,
    preference=10,
    needs=_needs,
    accepts=accepts,
    describe=describe,
    rejects=lambda options, facts: ["its weights cannot be split over several devices"] if facts.tensor_parallel_size > 1 else [],
    build=build,
)


@hookimpl
def octavo_models() -> list[ModelPlugin]:
    """The one model of this package."""
    return [LLAMA]

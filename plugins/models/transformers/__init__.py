"""Model plugin `transformers`: causal language models of Hugging Face's library, their attention replaced by the stack's kernel.

Must not import torch or the library at the top: listing plugins and judging a config.json read only this file and `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.descriptors import ModelPlugin, ModelShape
from octavo.core.errors import ModelSourceError
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions
from octavo.plugins.models.transformers.config import Unsupported, read_shape, refuse

if TYPE_CHECKING:
    import torch

    from octavo.core.model import Model, Ops
    from octavo.core.sources import ModelSource


class TransformersOptions(PluginOptions):
    """No options: everything is in the model's config.json."""


def _cannot_run(why: Unsupported) -> ModelSourceError:
    return ModelSourceError(f"model plugin 'transformers' cannot run this model: {why}")


def accepts(config: Mapping[str, Any]) -> str | None:
    """None if nothing in that config.json speaks against it, else the reason. What only the loaded model shows, `build` refuses."""
    try:
        refuse(config)
    except Unsupported as why:
        return str(why)
    return None


def describe(config: Mapping[str, Any]) -> ModelShape:
    """Sizes of the model with that config.json; `num_parameters` is None, since only the library's model can be counted.

    Asks the library, and with it torch, for what the config.json leaves out, unless it is of one of the families in `config`.
    Raises ModelSourceError where it isn't accepted.
    """
    try:
        return read_shape(config)
    except Unsupported as why:
        raise _cannot_run(why) from None


def build(
    source: ModelSource,
    options: TransformersOptions,
    ops: Ops,
    *,
    shard: tuple[int, int] = (0, 1),
    dtype: torch.dtype,
    device: torch.device,
) -> Model:
    """Load the weights of `source` as `dtype` on `device`, and try the model out. `ops` are not used: the library has its own.

    Raises ModelSourceError: bad or missing weights, or a model that would not compute the same under another attention.
    """
    from octavo.plugins.models.transformers.model import load

    try:
        return load(read_shape(source.config), source.path, dtype=dtype, device=device)
    except Unsupported as why:
        raise _cannot_run(why) from why.__cause__


TRANSFORMERS = ModelPlugin(
    name="transformers",
    summary="causal language models of Hugging Face transformers, through its AttentionInterface",
    options=TransformersOptions,
    preference=0,
    accepts=accepts,
    describe=describe,
    rejects=lambda options, facts: ["its weights cannot be split over several devices"] if facts.tensor_parallel_size > 1 else [],
    build=build,
)


@hookimpl
def octavo_models() -> list[ModelPlugin]:
    """The one model of this package."""
    return [TRANSFORMERS]

"""Ops `torch`: linears, norms, RoPE and activations as plain torch calls, on any device that torch knows.

Must not import torch at the top: listing plugins reads only the descriptor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.descriptors import Facts, OpsPlugin
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.core.model import Ops


class TorchOpsOptions(PluginOptions):
    """No options."""


def _build(options: TorchOpsOptions, facts: Facts) -> Ops:
    from octavo.plugins.ops.torch_ops.ops import TorchOps

    return TorchOps()


TORCH = OpsPlugin(
    name="torch",
    summary="plain torch calls, on any device",
    options=TorchOpsOptions,
    provides=frozenset({"weights:int8", "weights:int4"}),
    build=_build,
)


@hookimpl
def octavo_ops() -> list[OpsPlugin]:
    """The one set of ops of this package."""
    return [TORCH]

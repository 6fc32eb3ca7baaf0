"""`contiguous`: one region of slots for each sequence, reserved before it starts: the baseline that paging is compared with.

`reservation = "max"` is what the PagedAttention paper calls Orca (Max). Must not know: blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from octavo.core.descriptors import AllocatorPlugin, PoolShape
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator


class ContiguousOptions(PluginOptions):
    """Options of `contiguous`."""

    reservation: Literal["max", "request"] = Field(
        "max", description="slots for each sequence: max_model_len (max), or its prompt and max_tokens (request)"
    )
    placement: Literal["first_fit"] = Field("first_fit", description="where a region goes: the first free run that is long enough")


def _build(options: ContiguousOptions, pool: PoolShape) -> ContiguousAllocator:
    from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
    from octavo.plugins.allocators.first_fit import FirstFit

    return ContiguousAllocator(
        FirstFit(pool.num_slots),
        reservation=options.reservation,
        max_model_len=pool.max_model_len,
        host_capacity=pool.num_host_slots,
    )


CONTIGUOUS = AllocatorPlugin(
    name="contiguous",
    summary="One region a sequence, reserved in full before it starts.",
    layout="region",
    options=ContiguousOptions,
    build=_build,
)


@hookimpl
def octavo_allocators() -> Iterable[AllocatorPlugin]:
    """The contiguous allocator."""
    return [CONTIGUOUS]

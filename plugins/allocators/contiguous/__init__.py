"""`contiguous`: one region of slots for each sequence, reserved before it starts: the baseline that paging is compared with.

With `continuous` the reservations `max`, `pow2` and `oracle` are what the PagedAttention paper calls Orca (Max), (Pow2) and (Oracle).
Must not know: blocks.
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

    reservation: Literal["max", "request", "pow2", "oracle"] = Field(
        "max",
        description="slots for each sequence: max_model_len (max), its prompt and max_tokens (request), or its prompt and known_output_len "
        "(oracle) or the next power of two of that (pow2)",
    )
    placement: Literal["first_fit", "buddy"] = Field(
        "first_fit", description="where a region goes: the first free run that is long enough, or a power of two of slots (buddy)"
    )


def _build(options: ContiguousOptions, pool: PoolShape) -> ContiguousAllocator:
    from octavo.plugins.allocators.buddy import Buddy
    from octavo.plugins.allocators.contiguous.allocator import ContiguousAllocator
    from octavo.plugins.allocators.first_fit import FirstFit

    return ContiguousAllocator(
        FirstFit(pool.num_slots) if options.placement == "first_fit" else Buddy(pool.num_slots),
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

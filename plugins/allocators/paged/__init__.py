"""`paged`: fixed blocks and a block table for each sequence, as in PagedAttention (Kwon et al., 2023, section 4).

Memory is granted as a sequence grows, so only its last block has empty slots; forks share blocks until they write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from octavo.core.descriptors import AllocatorPlugin, PoolShape
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.plugins.allocators.paged.allocator import PagedAllocator


class PagedOptions(PluginOptions):
    """Options of `paged`."""

    block_size: int = Field(16, ge=1, description="slots in a block, any number from 1")


def _build(options: PagedOptions, pool: PoolShape) -> PagedAllocator:
    from octavo.plugins.allocators.paged.allocator import PagedAllocator

    return PagedAllocator(capacity=pool.num_slots, block_size=options.block_size, host_capacity=pool.num_host_slots)


PAGED = AllocatorPlugin(
    name="paged",
    summary="Fixed blocks and block tables; forks share blocks until they write (PagedAttention).",
    layout="block_table",
    options=PagedOptions,
    build=_build,
)


@hookimpl
def octavo_allocators() -> Iterable[AllocatorPlugin]:
    """The paged allocator."""
    return [PAGED]

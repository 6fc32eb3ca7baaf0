"""`prefix`: paged, and full blocks stay reusable under a hash of all tokens up to their end, across requests.

Which blocks hold the prefix of a new request is found by that hash; they are shared instead of being computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from octavo.core.descriptors import AllocatorPlugin, PoolShape
from octavo.core.hookspecs import hookimpl
from octavo.core.options import PluginOptions

if TYPE_CHECKING:
    from octavo.plugins.allocators.prefix.allocator import PrefixAllocator


class PrefixOptions(PluginOptions):
    """Options of `prefix`."""

    block_size: int = Field(16, ge=1, description="slots in a block, any number from 1; only full blocks are reused")
    hash: Literal["sha256", "xxh3+compare"] = Field(
        "sha256", description="how blocks are found: by a cryptographic hash, or by a fast one and a comparison of the token ids"
    )
    eviction: Literal["lru", "lfu", "fifo"] = Field(
        "lru", description="which unused prefix goes first, from its end: the longest unused, the least often found, or the oldest"
    )


def _build(options: PrefixOptions, pool: PoolShape) -> PrefixAllocator:
    from octavo.plugins.allocators.prefix.allocator import PrefixAllocator
    from octavo.plugins.allocators.prefix.block_keys import HASHES

    return PrefixAllocator(
        capacity=pool.num_slots,
        block_size=options.block_size,
        host_capacity=pool.num_host_slots,
        hashing=HASHES[options.hash],
        eviction=options.eviction,
    )


PREFIX = AllocatorPlugin(
    name="prefix",
    summary="Paged, and full blocks stay reusable across requests that begin alike (automatic prefix caching).",
    layout="block_table",
    options=PrefixOptions,
    build=_build,
)


@hookimpl
def octavo_allocators() -> Iterable[AllocatorPlugin]:
    """The prefix-caching allocator."""
    return [PREFIX]

"""What must hold after each step, looked at in tests and under `engine.debug`.

Must not know: plans, runners.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.core.errors import PluginContractError
from octavo.core.kv import Allocator
from octavo.core.request import Request
from octavo.core.scheduling import Scheduler


def check_books(scheduler: Scheduler, kv: Allocator, requests: Collection[Request]) -> None:
    """Each live request is in exactly one list, and each slot counted once. Raises PluginContractError."""
    kv.check()
    usage = kv.usage()
    listed = [*scheduler.waiting, *scheduler.running]
    if len(listed) != len(requests) or set(listed) != set(requests):
        raise PluginContractError(f"{type(scheduler).__name__} does not keep each live request in exactly one of its lists")
    if usage.filled + usage.held + usage.external + usage.cached + usage.free != kv.capacity:
        raise PluginContractError(f"{type(kv).__name__}: {usage} does not sum to its capacity of {kv.capacity} slots")

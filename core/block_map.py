"""What each block or region of a pool holds, kept up to date from block events.

Begin with an allocator's `snapshot` and apply what `drain_events` brings from then on. Must not know: allocators' insides, texts.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.kv import BlockEvent, BlockState


class BlockMap:
    """Blocks that hold something, by their first slot. All others are free."""

    def __init__(self, snapshot: Iterable[BlockState] = ()) -> None:
        self._states = {state.start: state for state in snapshot}

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Bring it up to date."""
        states = self._states
        for event in events:
            state = states.get(event.start)
            owners, key = (state.owners, state.key) if state is not None else ((), "")
            match event.kind:
                case "taken":
                    owners = (*owners, event.owner)
                case "released":
                    at = owners.index(event.owner) if event.owner in owners else len(owners)
                    owners = owners[:at] + owners[at + 1 :]
                case "cached":
                    key = event.key
                case "evicted":
                    key = ""
            if owners or key:
                states[event.start] = BlockState(event.start, event.count, owners, key)
            else:
                states.pop(event.start, None)

    def states(self) -> list[BlockState]:
        """By first slot."""
        return [self._states[start] for start in sorted(self._states)]

"""`BlockWatch`: what each block of the KV pool holds, for whoever looks; while nobody does, it costs nothing.

The first look takes a snapshot and turns the allocator's events on; from then on a step hands over what changed. After a while without
looks they are off again. It alone turns them on and takes them. Must not know: HTTP, texts.
"""

from __future__ import annotations

from collections import deque

from octavo.core.block_map import BlockMap
from octavo.core.engine import Engine
from octavo.core.kv import BlockEvent, BlockState
from octavo.core.outputs import StepReport

IDLE_S = 60.0  # without a look
MOST_EVENTS = 1_000_000  # that nobody fetched


class BlockWatch:
    """`look` and the observer's method belong to the engine's thread, `states` to one other."""

    def __init__(self) -> None:
        self.on = False
        self._looks = 0
        self._looked_at = 0.0
        self._events: list[BlockEvent] = []  # since the last look
        self._ready: deque[tuple[int, list[BlockState] | None, list[BlockEvent]]] = deque()  # by look: a snapshot, and what came after it
        self._map = BlockMap()

    def look(self, engine: Engine) -> int:
        """Take down what happened up to now, between two steps. Returns the number of this look, for `states`."""
        snapshot = None
        if self.on:
            self._events += engine.reports.drain_events()
        else:
            self.on = engine.kv.observed = True
            self._engine = engine
            engine.reports.drain_events()
            engine.observers.add(self)
            snapshot = engine.kv.snapshot()
        self._looks += 1
        self._looked_at = engine.clock.now()
        self._ready.append((self._looks, snapshot, self._events))
        self._events = []
        return self._looks

    def octavo_step_finished(self, report: StepReport) -> None:
        """Keep what changed in the step."""
        self._events += report.events
        if report.time - self._looked_at > IDLE_S or len(self._events) > MOST_EVENTS:
            self.on = self._engine.kv.observed = False
            self._engine.observers.remove(self)
            self._events = []

    def states(self, look: int) -> list[BlockState]:
        """Blocks that held something at this look."""
        while self._ready and self._ready[0][0] <= look:
            _, snapshot, events = self._ready.popleft()
            if snapshot is not None:
                self._map = BlockMap(snapshot)
            self._map.apply(events)
        return self._map.states()

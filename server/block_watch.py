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
        self._looked_at = 0.0
        self._pending: deque[tuple[BlockEvent, ...] | list[BlockState]] = deque()
        self._num_pending = 0
        self._map = BlockMap()

    def look(self, engine: Engine) -> None:
        """Fetch what happened up to now; to be called between two steps."""
        self._looked_at = engine.clock.now()
        if not self.on:
            self.on = engine.kv.observed = True
            self._engine = engine
            engine.kv.drain_events()
            self._pending.clear()
            self._pending.append(engine.kv.snapshot())
            engine.observers.add(self)
        else:
            self._pending.append(tuple(engine.kv.drain_events()))
        self._num_pending = 0

    def octavo_step_finished(self, report: StepReport) -> None:
        """Keep what changed in the step."""
        self._num_pending += len(report.events)
        if report.time - self._looked_at > IDLE_S or self._num_pending > MOST_EVENTS:
            self.on = self._engine.kv.observed = False
            self._engine.observers.remove(self)
            self._pending.clear()
        elif report.events:
            self._pending.append(report.events)

    def states(self) -> list[BlockState]:
        """Blocks that hold something, as of the last look."""
        while self._pending:
            news = self._pending.popleft()
            if isinstance(news, list):
                self._map = BlockMap(news)
            else:
                self._map.apply(news)
        return self._map.states()

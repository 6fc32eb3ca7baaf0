"""Prefix caches that break one promise each."""

from __future__ import annotations

from typing import Any

from octavo.core.request import Request, Sequence
from octavo.plugins.allocators.prefix.allocator import PrefixAllocator
from octavo.plugins.allocators.prefix.block_keys import Hashing
from octavo.plugins.allocators.prefix.cache import Entry, PrefixCache


class DoesNotPin(PrefixAllocator):
    """Fault 3: found blocks stay on the shelf."""

    def open(self, sequence: Sequence) -> int:
        found = super().open(sequence)
        for block in self._paged.blocks(sequence):
            entry = self._cache.entry_of(block)
            if entry is not None and self._paged._pool.refs[block] == 1:
                self._cache.keep(block)
        return found


class HitsAll(PrefixAllocator):
    """Fault 2: a prompt of whole blocks is found whole."""

    def open(self, sequence: Sequence) -> int:
        sequence.output.append(0)
        found = super().open(sequence)
        sequence.output.pop()
        return found


class RegistersAtReserve(PrefixAllocator):
    """Fault 1."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reserve = self.reserve_and_enter  # type: ignore[method-assign]

    def reserve_and_enter(self, sequence: Sequence, start: int, stop: int) -> bool:
        granted = self._paged.reserve(sequence, start, stop)
        full = min(stop, sequence.num_tokens) // self.block_size
        if granted and full:
            self._enter(sequence, self._paged.blocks(sequence), full)
        return granted


class IgnoresExtras(PrefixAllocator):
    """Fault 8."""

    def open(self, sequence: Sequence) -> int:
        request, extras = sequence.request, Request.cache_key
        try:
            Request.cache_key = property(lambda self: ())  # type: ignore[method-assign,assignment]
            return super().open(sequence)
        finally:
            Request.cache_key = extras  # type: ignore[method-assign]
            assert request is sequence.request


class TrustsAnyHash(PrefixAllocator):
    """Fault 6: a weak hash, and nobody compares."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"hashing": Hashing(options["hashing"].digest, compare=False)})


class CountsEveryAdmission(PrefixAllocator):
    """Fault 9."""

    def open(self, sequence: Sequence) -> int:
        found = super().open(sequence)
        self._uncounted.add(sequence)
        return found


class ForgetsKeys(PrefixAllocator):
    """A waiting request is hashed again each time."""

    def close(self, sequence: Sequence) -> None:
        super().close(sequence)
        self._away.pop(sequence, None)


class KeepsKeys(PrefixAllocator):
    """A sequence that is gone leaves its keys."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._away = {}  # type: ignore[assignment]


class ResetsUnusedOnly(PrefixAllocator):
    """What live sequences computed before a reset can be found after it."""

    def reset(self) -> None:
        super().reset()
        for chain in (*self._chains.values(), *self._away.values()):
            chain.ended = False


class ReadsAlways(PrefixAllocator):
    """Fault 7."""

    def open(self, sequence: Sequence) -> int:
        wanted, sequence.request.prompt_scored = sequence.request.prompt_scored, True
        found = super().open(sequence)
        sequence.request.prompt_scored = wanted
        return found


# ------------------------------------------------------------------------------ the cache


class WithCache(PrefixAllocator):
    """The allocator as it is around a broken cache."""

    cache: type[PrefixCache]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._cache.__class__ = self.cache


class KeepsHash(WithCache):
    """Fault 4: a block that is given up can still be found."""

    class cache(PrefixCache):
        def _forget(self, entry: Entry) -> None:
            if entry.parent is not None:
                entry.parent.num_children -= 1
                if entry.parent.shelved and not entry.parent.num_children:
                    self._enqueue(entry.parent)


class WritesWhatIsFound(WithCache):
    """Copy on write by count alone: the one holder writes, and others find what it wrote."""

    class cache(PrefixCache):
        def overwrite(self, block: int) -> None:
            pass


class HeadsFirst(WithCache):
    """Fault 5: the beginning goes and leaves an end that nobody can reach."""

    class cache(PrefixCache):
        def _least_wanted(self) -> Entry:
            return min((e for e in self.entries.values() if e.shelved), key=lambda e: e.index)


class LeavesOrphans(WithCache):
    """What follows a forgotten block stays entered."""

    class cache(PrefixCache):
        def _forget(self, entry: Entry) -> None:
            entry.num_children = 0
            super()._forget(entry)


class LosesOrphans(WithCache):
    """Blocks that cannot be found any more are never used again."""

    class cache(PrefixCache):
        def _forget(self, entry: Entry) -> None:
            super()._forget(entry)
            self._orphans.clear()


class ForgetsQueue(WithCache):
    """A beginning whose end was given up is not."""

    class cache(PrefixCache):
        def _enqueue(self, entry: Entry) -> None:
            if not entry.index:
                super()._enqueue(entry)

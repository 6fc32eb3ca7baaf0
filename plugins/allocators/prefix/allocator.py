"""Prefix caching: a paged allocator whose full blocks can be found by what they hold, as long as nobody needs their room.

A prompt's longest cached prefix is shared instead of computed. Blocks are entered once they are committed, never before, outputs too,
those of a step together; they outlive their sequence until they are evicted. Beside the paged allocator and not under it: its books are
left as they are.
Must not know: schedulers, tensors, how a block is hashed, which one is evicted.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from octavo.core.errors import PluginContractError
from octavo.core.kv import Allocator, BlockEvent, BlockState, KVStats, KVUsage
from octavo.core.plan import Transfer
from octavo.core.request import Request, Sequence, Status
from octavo.plugins.allocators.paged.allocator import PagedAllocator
from octavo.plugins.allocators.prefix.block_keys import BYTES_PER_TOKEN, Hashing, extend, packed, root_key
from octavo.plugins.allocators.prefix.cache import Entry, Extras, PrefixCache
from octavo.plugins.allocators.prefix.explain import explain

if TYPE_CHECKING:
    from typing import Literal

    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class Chain:
    """Keys of a sequence's first full blocks. It outlives `close` while the request waits, so that nothing is hashed twice."""

    extras: Extras  # what else must agree
    keys: list[bytes] = field(default_factory=list)
    num_entered: int = 0  # blocks whose content the cache has been told
    tip: Entry | None = None  # under which the last of these is found
    num_hit: int = 0  # tokens found when it was opened
    counted: bool = False  # in the statistics: the first admission alone is
    ended: bool = False  # no more is entered: computed before a reset, or behind a collision


class PrefixAllocator(Allocator):
    """`capacity` and `host_capacity` are rounded down to whole blocks. Raises InvalidOptionsError if the pool holds not even one."""

    layout = "block_table"

    def __init__(self, *, capacity: int, block_size: int, hashing: Hashing, eviction: str = "lru", host_capacity: int = 0) -> None:
        super().__init__()
        self._cache = PrefixCache(capacity // block_size, eviction=eviction, tell=self._tell, look=self._enter_full)
        self._paged = PagedAllocator(
            capacity=capacity, block_size=block_size, host_capacity=host_capacity, shelf=self._cache, on_full=self._fill, name="prefix"
        )
        self.block_size = block_size
        self.capacity = self._paged.capacity
        self.host_capacity = self._paged.host_capacity
        self._digest, self._compare = hashing.digest, hashing.compare
        self._width = block_size * BYTES_PER_TOKEN
        self._full: list[tuple[Sequence, Seq[int], int]] = []  # blocks that are full and not entered yet, at most one step's
        self._chains: dict[Sequence, Chain] = {}  # of open sequences
        self._away: WeakKeyDictionary[Sequence, Chain] = WeakKeyDictionary()  # of those that wait or are suspended
        self._computing: dict[Sequence, int] = {}  # open ones whose first so many blocks are not all entered yet: prompts in progress
        self._uncounted = set[Sequence]()  # open ones that are not in the statistics yet
        self._queried = self._hit = 0
        # Asked for every row of every step: straight through, without a call between.
        self.reserve = self._paged.reserve  # type: ignore[method-assign]
        self.commit = self._paged.commit  # type: ignore[method-assign]
        self.table = self._paged.table  # type: ignore[method-assign]

    # -------------------------------------------------------------- one sequence

    def fits(self, *requests: Request) -> bool:
        """As without a cache: what is kept makes room, and nothing may have been found by then."""
        return self._paged.fits(*requests)

    def open(self, sequence: Sequence) -> int:
        """Share the blocks of the longest cached prefix. One token at least is left to compute: its logits are wanted."""
        self._enter_full()
        chain = self._chain_of(sequence)
        chain.ended = False
        found: list[Entry] = []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        if sequence.request.reads_cache:
            self._hash(sequence, chain, num_blocks)
            found = self._find(sequence, chain, num_blocks)
        if len(found) < num_blocks:
            self._computing[sequence] = num_blocks
        chain.num_entered, chain.tip = len(found), found[-1] if found else None
        chain.num_hit = len(found) * self.block_size
        self._paged.adopt(sequence, [entry.block for entry in found], chain.num_hit)
        for entry in found:
            entry.hits += 1
        self._chains[sequence] = chain
        self._away.pop(sequence, None)
        if not chain.counted:
            self._uncounted.add(sequence)
        return chain.num_hit

    def _chain_of(self, sequence: Sequence) -> Chain:
        return self._away.get(sequence) or Chain(sequence.request.cache_key)

    def coming(self, sequence: Sequence) -> tuple[int, int]:
        """The blocks after those that are found, as far as the prompt in progress that has most of them goes.

        By keys alone: after a collision somebody waits in vain, not longer than that prompt takes.
        """
        if not self._computing or not sequence.request.reads_cache:
            return 0, 0
        self._enter_full()
        chain = self._away.setdefault(sequence, Chain(sequence.request.cache_key))
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        self._hash(sequence, chain, num_blocks)
        keys, entries = chain.keys, self._cache.entries
        first = stop = bisect(range(num_blocks), False, key=lambda index: keys[index] not in entries)  # who is found has its parents there
        for other, num_theirs in self._computing.items():
            theirs = self._chains[other].keys
            most = min(num_blocks, num_theirs, len(theirs))
            if first < most and theirs[first] == keys[first]:
                stop = max(stop, bisect(range(most), False, lo=first, key=lambda index: theirs[index] != keys[index]))
        return first * self.block_size, stop * self.block_size

    def _hash(self, sequence: Sequence, chain: Chain, num_blocks: int) -> None:
        """Keys of the first blocks; of those alone that were never hashed."""
        if len(chain.keys) < num_blocks:
            data = packed(sequence.tokens(len(chain.keys) * self.block_size, num_blocks * self.block_size))
            extend(chain.keys, data, width=self._width, digest=self._digest, extras=chain.extras)

    def _find(self, sequence: Sequence, chain: Chain, num_blocks: int) -> list[Entry]:
        """The entries of the first full blocks, whose keys are known, up to the first that is not there."""
        entries, found, width, keys, extras = self._cache.entries, list[Entry](), self._width, chain.keys, chain.extras
        if not self._compare:
            for key in keys[:num_blocks]:
                entry = entries.get(key)
                if entry is None:
                    break
                found.append(entry)
            return found
        data, parent = packed(sequence.tokens(0, num_blocks * self.block_size)), None
        for index, key in enumerate(keys[:num_blocks]):
            entry = entries.get(key)
            if entry is None or not _same(entry, parent, data[index * width : (index + 1) * width], extras):
                break
            found.append(entry)
            parent = entry
        return found

    def reserve(self, sequence: Sequence, start: int, stop: int) -> bool:
        """As paged; a block that can be found is forgotten before its one holder writes into it."""
        return self._paged.reserve(sequence, start, stop)

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """As paged, which tells of blocks that are full from now on: from now on they can be found."""
        self._paged.commit(sequence, num_tokens)

    def _fill(self, sequence: Sequence, blocks: Seq[int], num_full: int) -> None:
        """Blocks are full. They are entered with those of the other rows of the step, which costs half of one at a time."""
        self._full.append((sequence, blocks, num_full))

    def _enter_full(self) -> None:
        """Before the next plan, and before anybody looks or a block changes hands."""
        if self._full:
            full, self._full = self._full, []
            for sequence, blocks, num_full in full:
                self._enter(sequence, blocks, num_full)

    def _enter(self, sequence: Sequence, blocks: Seq[int], num_full: int) -> None:
        """Enter the first `num_full` blocks: from where the last call ended, or from the first if that was forgotten since."""
        chain = self._chains[sequence]
        if chain.ended:
            return
        entries, keys, extras, size = self._cache.entries, chain.keys, chain.extras, self.block_size
        first, parent = chain.num_entered, chain.tip
        if parent is None or parent.forgotten:
            first, parent = 0, None  # perhaps another's copy of the same block, and evicted: this sequence still holds its own
        for index in range(first, num_full):
            at = index * size - sequence.prompt_len  # in the output, where a decoding row's blocks are
            tokens = packed(sequence.output[at : at + size] if at >= 0 else sequence.tokens(index * size, (index + 1) * size))
            if index == len(keys):
                keys.append(self._digest((keys[-1] if keys else root_key(self._digest, extras)) + tokens))
            key = keys[index]
            entry = entries.get(key)
            if entry is None:
                entry = self._cache.register(key, blocks[index], parent=parent, tokens=tokens, extras=extras)
            elif self._compare and not _same(entry, parent, tokens, extras):
                chain.ended = True  # a collision: who has the key keeps it, and what follows here could not be found
                self._computing.pop(sequence, None)
                return
            parent = entry
        chain.num_entered, chain.tip = num_full, parent
        if num_full >= self._computing.get(sequence, num_full + 1):
            del self._computing[sequence]

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Share the blocks of the first `num_tokens` positions, which must be committed, and their keys."""
        self._enter_full()
        self._paged.fork(parent, child, num_tokens)
        source, chain, full = self._chains[parent], self._chain_of(child), num_tokens // self.block_size
        if len(chain.keys) < full:
            chain.keys = source.keys[:full]
        shares_tip = source.num_entered == full
        chain.num_entered, chain.tip = (full, source.tip) if shares_tip else (0, None)
        chain.counted, chain.ended = True, source.ended
        self._chains[child] = chain
        self._away.pop(child, None)

    def close(self, sequence: Sequence) -> None:
        """Full blocks stay reusable, the last one the first to go."""
        self._enter_full()
        self._count(sequence)
        self._paged.close(sequence)
        self._uncounted.discard(sequence)
        self._computing.pop(sequence, None)
        chain = self._chains.pop(sequence, None) or self._away.pop(sequence)
        if sequence.status is not Status.DONE:
            self._away[sequence] = chain

    # --------------------------------------------------------------- host memory

    def suspend(self, sequences: list[Sequence]) -> bool:
        """As paged; the blocks in the pool stay reusable as if these were closed."""
        self._enter_full()
        for sequence in sequences:
            self._count(sequence)
        if not self._paged.suspend(sequences):
            return False
        for sequence in sequences:
            self._away[sequence] = self._chains.pop(sequence)
            self._uncounted.discard(sequence)
            self._computing.pop(sequence, None)
        return True

    def resume(self, sequences: list[Sequence]) -> list[int] | None:
        """As paged. That is no hit, and nothing that returns is found before the next block is full."""
        counts = self._paged.resume(sequences)
        if counts is None:
            return None
        for sequence in sequences:
            chain = self._chains[sequence] = self._away.pop(sequence)
            chain.num_entered, chain.tip = 0, None
            if not chain.counted:
                self._uncounted.add(sequence)
        return counts

    # -------------------------------------------------------------------- books

    def table(self, sequence: Sequence) -> tuple[npt.NDArray[np.int32], int]:
        """As paged."""
        return self._paged.table(sequence)

    def snapshot(self) -> list[BlockState]:
        """As paged, with those that can be found; what is kept but cannot be found any more is as good as free."""
        size, states = self.block_size, {state.start: state for state in self._paged.snapshot()}
        for entry in self._cache.entries.values():
            start = entry.block * size
            owners = states[start].owners if start in states else ()
            states[start] = BlockState(start, size, owners, entry.key.hex())
        return [states[start] for start in sorted(states)]

    def reset(self) -> None:
        """Nothing that was computed so far is found any more; unused blocks are free."""
        self._enter_full()
        self._cache.clear()
        self._computing.clear()
        self._paged.reset()
        for chain in (*self._chains.values(), *self._away.values()):
            chain.ended = True

    def _count(self, sequence: Sequence) -> None:
        """Count what was found for this sequence once it has run: not for a refused admission, nor when it comes back."""
        if sequence not in self._uncounted:
            return
        chain = self._chains[sequence]
        if self._paged.committed(sequence) > chain.num_hit:
            self._uncounted.remove(sequence)
            chain.counted = True
            self._queried += sequence.prompt_len
            self._hit += chain.num_hit

    def stats(self) -> KVStats:
        """Hits are counted when a request first runs, not when it comes back from a preemption."""
        self._enter_full()
        for sequence in list(self._uncounted):
            self._count(sequence)
        inner = self._paged.stats()
        return KVStats(
            queried_tokens=self._queried,
            hit_tokens=self._hit,
            evictions=self._cache.evictions,
            copies=inner.copies,
            transfers=inner.transfers,
        )

    def usage(self) -> KVUsage:
        """O(1). `cached`: blocks kept for reuse that nobody refers to; they are as good as free."""
        return self._paged.usage()

    def explain(self, request: Request) -> str:
        """Where and why the cached prefix of this prompt ends."""
        self._enter_full()
        return explain(request, self._cache, block_size=self.block_size, digest=self._digest)

    @property
    def observed(self) -> bool:
        """The paged allocator keeps the events."""
        return self._paged.observed

    @observed.setter
    def observed(self, wanted: bool) -> None:
        self._paged.observed = self._cache.observed = wanted

    def _tell(self, kind: Literal["cached", "evicted"], block: int, key: bytes) -> None:
        self._paged.tell_content(kind, block, key.hex())

    def drain_transfers(self) -> list[Transfer]:
        """As paged."""
        self._enter_full()
        return self._paged.drain_transfers()

    def requeue(self, transfers: tuple[Transfer, ...]) -> None:
        """As paged."""
        self._paged.requeue(transfers)

    def drain_events(self) -> list[BlockEvent]:
        """As paged, with what can be found and what was forgotten."""
        self._enter_full()
        return self._paged.drain_events()

    def check(self) -> None:
        """The paged books, the tree of entries, and that each block in use is found only by what it holds."""
        self._enter_full()
        self._paged.check()
        live = set[int]()
        for sequence, chain in self._chains.items():
            blocks = self._paged.blocks(sequence)
            live.update(blocks)
            for index, block in enumerate(blocks[: sequence.num_computed // self.block_size]):
                entry = self._cache.entry_of(block)
                if entry is not None and (index >= len(chain.keys) or entry.key != chain.keys[index]):
                    raise PluginContractError(f"prefix: block {block} of {sequence.id!r} is found by what it does not hold")
        self._cache.check(live)
        for sequence, num_blocks in self._computing.items():
            if sequence not in self._chains or self._chains[sequence].num_entered >= num_blocks:
                raise PluginContractError(f"prefix: {sequence.id!r} is said to compute its prompt, but is closed or has done so")


def _same(entry: Entry, parent: Entry | None, tokens: bytes, extras: Extras) -> bool:
    """The entry is this block of tokens after that parent, and not one that merely hashes alike."""
    return entry.parent is parent and entry.tokens == tokens and entry.extras == extras

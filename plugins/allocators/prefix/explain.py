"""Says in a sentence where the cached prefix of a prompt ends, and why. Slow and for people; it changes nothing.

Must not tell a user what others asked: positions, never tokens.
"""

from __future__ import annotations

from octavo.core.request import Request
from octavo.plugins.allocators.prefix.block_keys import BYTES_PER_TOKEN, Digest, extend, packed
from octavo.plugins.allocators.prefix.cache import Entry, Extras, PrefixCache


def explain(request: Request, cache: PrefixCache, *, block_size: int, digest: Digest) -> str:
    """The first block that was not found: never computed, evicted, of other tokens from some position on, or of another salt."""
    length, width = len(request.prompt), block_size * BYTES_PER_TOKEN
    num_blocks = (length - 1) // block_size
    if not request.reads_cache:
        return "the request does not read the cache: it wants the logits of every prompt position"
    if not num_blocks:
        return f"a prompt of {length} tokens has no full block of {block_size} before its last token, so nothing can be found"
    if not cache.entries and not cache.recent:
        return "nothing is cached yet"
    keys: list[bytes] = []
    data = packed(request.prompt[: num_blocks * block_size])
    extend(keys, data, width=width, digest=digest, extras=request.cache_key)
    last: Entry | None = None
    for index, key in enumerate(keys):
        tokens = data[index * width : (index + 1) * width]
        entry = cache.entries.get(key)
        if entry is None or entry.parent is not last or entry.tokens != tokens:
            start = index * block_size
            reason = "was evicted" if key in cache.recent else _reason(cache, last, tokens, request.cache_key, start)
            return f"{index} of {num_blocks} full blocks are cached; block {index} (tokens {start} to {start + block_size - 1}) {reason}"
        last = entry
    return f"all {num_blocks} full blocks are cached: {num_blocks * block_size} of {length} prompt tokens"


def _reason(cache: PrefixCache, parent: Entry | None, tokens: bytes, extras: Extras, start: int) -> str:
    """What is cached instead after the same beginning, which ends at token `start`."""
    beside = [entry for entry in cache.entries.values() if entry.parent is parent]
    other = [entry.extras for entry in beside if entry.tokens == tokens and entry.extras != extras]
    if other:
        kinds = sorted({kind for found in other for kind, _ in set(found) ^ set(extras)})
        return f"is cached under another {' and '.join(kinds)}"
    beside = [entry for entry in beside if entry.extras == extras]
    equal = max((_equal_tokens(entry.tokens, tokens) for entry in beside), default=0)
    if equal:
        return f"differs from what is cached there from token {start + equal} on"
    return "has never been computed after this beginning" if start else "has never been computed"


def _equal_tokens(one: bytes, other: bytes) -> int:
    pairs = zip(memoryview(one).cast("I"), memoryview(other).cast("I"), strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(one) // BYTES_PER_TOKEN)

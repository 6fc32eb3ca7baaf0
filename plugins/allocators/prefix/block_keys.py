"""Keys of full blocks: a hash chain, so that equal keys mean equal tokens from the very first on.

    key[i] = hash(key[i - 1] + token ids of block i as 32-bit numbers),   key[-1] = hash(what else must agree: a salt, ...)

With a cryptographic hash nobody can make two prompts meet; a fast one is as safe if the token ids are compared on every hit.
Must not know: blocks, pools.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

import xxhash

Digest = Callable[[bytes], bytes]
BYTES_PER_TOKEN = array("I").itemsize


@dataclass(frozen=True, slots=True)
class Hashing:
    """A hash function, and whether its hits must be compared token by token."""

    digest: Digest
    compare: bool


HASHES = {
    "sha256": Hashing(lambda data: sha256(data).digest(), compare=False),
    "xxh3+compare": Hashing(xxhash.xxh3_128_digest, compare=True),
}


def packed(tokens: Iterable[int]) -> bytes:
    """Token ids as 32-bit numbers, one after the other."""
    return array("I", tokens).tobytes()


def root_key(digest: Digest, extras: Iterable[tuple[str, str]]) -> bytes:
    """Where a chain begins: each extra with its kind and its lengths, so that no two lists of extras read alike."""
    parts = [part.encode("utf-8", "surrogatepass") for extra in extras for part in extra]
    return digest(b"".join(len(part).to_bytes(4, "big") + part for part in parts))


def extend(keys: list[bytes], data: bytes, *, width: int, digest: Digest, extras: Iterable[tuple[str, str]]) -> None:
    """Append the keys of the next blocks, whose packed tokens are `data`, `width` bytes a block."""
    key = keys[-1] if keys else root_key(digest, extras)
    for at in range(0, len(data), width):
        key = digest(key + data[at : at + width])
        keys.append(key)

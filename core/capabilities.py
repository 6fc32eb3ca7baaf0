"""The words in which plugins say what they need and provide: the only place where a capability is defined.

A third party may add words of its own with a dot in them (`mycorp.compressed_kv`); a word without a dot must be one of these.
Must not know: descriptors, the registry.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.errors import PluginContractError
from octavo.core.suggest import did_you_mean

DTYPES = ("float32", "bfloat16", "float16")


class Capability(NamedTuple):
    """What a word means, and who provides it: a kind of plugin, or `facts` (the device and the chosen types)."""

    meaning: str
    provided_by: str


CAPABILITIES: dict[str, Capability] = {
    "contiguous_kv": Capability("attends over a KV cache in which each sequence owns one run of slots", "kernel"),
    "paged_kv": Capability("attends over a KV cache reached through a block table", "kernel"),
    "window": Capability("lets a layer see only its last so many positions", "kernel"),
    "softcap": Capability("bounds attention scores with tanh (Gemma 2)", "kernel"),
    "sinks": Capability("adds a learned sink to each head's softmax", "kernel"),
    "weights:*": Capability("holds weights in so many bits: weights:int8, weights:int4", "ops"),
    "device:*": Capability("runs on this type of device: device:cpu, device:cuda, ...", "facts"),
    "dtype:*": Capability("weights and activations have this type: " + ", ".join(f"dtype:{name}" for name in DTYPES), "facts"),
    "kv_dtype:*": Capability("the KV cache has this type: " + ", ".join(f"kv_dtype:{name}" for name in DTYPES), "facts"),
}


def capability(word: str) -> Capability | None:
    """The definition of `word`; None for a third party's own (dotted) word. An unknown word is a `PluginContractError`."""
    family, colon, member = word.partition(":")
    found = CAPABILITIES.get(f"{family}:*" if colon and member else word)
    if found is None and "." not in word:
        names = [name for name in CAPABILITIES if not name.endswith("*")]
        raise PluginContractError(
            f"unknown capability {word!r}{did_you_mean(word, names)}: "
            f"known are {', '.join(CAPABILITIES)}; a word of your own needs a dot, like 'mycorp.{word}'"
        )
    return found

"""`Work`: what a run asks for, as lengths and token ids, never text. The same seed gives the same work, and a hash says whether it did.

Must not know: engines, HTTP, how it is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request. It is greedy, ignores EOS and runs to `output_len`, so that every stack does the same."""

    prompt: tuple[int, ...]  # token ids; of a later turn of a conversation, its new ones alone
    output_len: int
    at: float = 0.0  # seconds after the start at which it is due, in an open loop
    class_name: str = "default"
    after: int | None = None  # the item that must be answered first; its prompt and answer come before `prompt`
    pause: float = 0.0  # seconds between that answer and this request

    def __post_init__(self) -> None:
        if self.output_len < 1 or not self.prompt:
            raise ValueError(f"an item needs at least one prompt token and one output token, not {len(self.prompt)} and {self.output_len}")


_NAMES = tuple(entry.name for entry in fields(Item))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Items in the order of their `at`, and what they were made from."""

    name: str
    items: Sequence[Item]
    seed: int = 0
    made_from: dict[str, Any] = field(default_factory=dict)  # the workload's sizes, to be printed

    def prompt_len(self, index: int) -> int:
        """Tokens of the whole prompt, that of the turns before included."""
        total = len(self.items[index].prompt)
        for before in _turns_before(self, index):
            total += len(self.items[before].prompt) + self.items[before].output_len
        return total

    @property
    def digest(self) -> str:
        """sha256 of the items, in hex: two runs with the same one asked for the same."""
        items = json.dumps([{name: getattr(item, name) for name in _NAMES} for item in self.items], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(items.encode()).hexdigest()


def prompt_of(work: Work, index: int, answers: Mapping[int, Sequence[int]]) -> list[int]:
    """The whole prompt of an item: that of the turn before, its answer, and the new tokens. Raises KeyError without that answer."""
    turns = [*_turns_before(work, index)][::-1]
    said = [token for turn in turns for token in (*work.items[turn].prompt, *answers[turn])]
    return [*said, *work.items[index].prompt]


def _turns_before(work: Work, index: int) -> Iterator[int]:
    """The items that it goes on from, the last one first. A conversation may have more turns than Python lets a function call itself."""
    after = work.items[index].after
    while after is not None:
        yield after
        after = work.items[after].after

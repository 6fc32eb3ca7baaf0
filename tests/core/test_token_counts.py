"""Counts follow a sequence's output, however it came about."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.core.token_counts import TokenCounts


def _counted(counts: TokenCounts) -> dict[int, int]:
    assert len(counts.ids) == len(counts.counts) == len(set(counts.ids.tolist()))
    return dict(zip(counts.ids.tolist(), counts.counts.astype(int).tolist(), strict=True))


@pytest.mark.parametrize("prompt", [[], [5, 5, 1, 700]], ids=str)
def test_counts_are_those_of_the_whole_output(prompt: list[int]) -> None:
    """After any number of tokens at once; the prompt's ids are there with a count of 0 unless the output has them."""
    rng = random.Random(0)
    counts, output = TokenCounts(prompt), list[int]()
    for _ in range(300):
        output += [rng.randrange(400) for _ in range(rng.choice((0, 1, 1, 3)))]
        assert _counted(counts.follow(output)) == dict.fromkeys(prompt, 0) | Counter(output)


def test_another_list_is_counted_anew() -> None:
    """An output that was replaced, longer or not, and one that lost tokens."""
    counts = TokenCounts([9])
    output = [1, 2, 2]
    counts.follow(output)
    assert _counted(counts.follow([1, 2, 3, 4])) == {9: 0, 1: 1, 2: 1, 3: 1, 4: 1}
    assert _counted(counts.follow(output)) == {9: 0, 1: 1, 2: 2}
    del output[1:]
    assert _counted(counts.follow(output)) == {9: 0, 1: 1}


def test_each_token_is_looked_at_once() -> None:
    """A step costs its new tokens, not the whole output."""

    class Watched(list[int]):
        looked_at = 0

        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            found = super().__getitem__(index)  # type: ignore[index]
            self.looked_at += len(found)  # type: ignore[arg-type]
            return found

    output, counts = Watched(), TokenCounts()
    for token in range(50):
        output.append(token % 7)
        counts.follow(output)
    assert output.looked_at == 50

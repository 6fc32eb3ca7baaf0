"""The figures and sentences of docs/explanation/kv-cache.md are what the allocators say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins.allocators.memory import contiguous, request, start
from tests.plugins.allocators.test_prefix import done, pool

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "kv-cache.md").read_text()


@pytest.mark.parametrize("reservation", ["max", "request", "pow2", "oracle"])
def test_the_slots_of_each_reservation(reservation: str) -> None:
    """A prompt of 100 tokens and an answer of 25, in a context of 2,048."""
    kv = contiguous(4_096, reservation=reservation, max_model_len=2_048)
    lead = start(kv, request(100, 25))
    (slots,) = re.findall(rf"^\| `{reservation}` \| (\d+) \|", PAGE, re.MULTILINE)
    assert kv.region(lead)[1] == int(slots)


def test_the_sentences_of_explain() -> None:
    """Each that the page shows is said, word by word."""
    kv = pool(6)
    said = {kv.explain(request(9, 4))}
    done(kv, request(12, 4))
    said |= {
        kv.explain(request(prompt, 4, salt=salt))
        for prompt, salt in (
            (range(12), ""),
            ([0, 1, 2, 3, 4, 5, 77, 7, 8], ""),
            (range(9), "other"),
            ([0, 1, 2, 3, 77, 5, 6, 7, 8], ""),
        )
    }
    start(kv, request(range(50, 66), 1, name="other"))
    said.add(kv.explain(request(13, 4)))
    shown = set(re.findall(r"^\| `([^`]*cached[^`]*)` \| (?!.*slot)", PAGE.partition("Why was it not found")[2], re.MULTILINE))
    assert shown == said

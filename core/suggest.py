"""The nearest known word to a mistyped one, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " (did you mean X?)" for the known word X nearest to `word`, or "" where none is near."""
    matches = get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""

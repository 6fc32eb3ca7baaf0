"""How often each token occurs in one sequence's output: what penalties are computed from.

Belongs to the sequence and follows its output by itself, so that rows may move, end and come back. Must not know: torch, penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

_ROOM = 64  # entries more than are needed now


class TokenCounts:
    """Distinct ids, those of `prompt` first (with a count of 0 unless the output holds them too), and how often the output holds each."""

    __slots__ = ("_counted", "_counts", "_ids", "_output", "_places", "_prompt")

    _ids: npt.NDArray[np.int64]
    _counts: npt.NDArray[np.float64]
    _places: dict[int, int]  # id -> index in these two, which are longer than it
    _output: list[int]
    _counted: int  # tokens of `_output`

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._prompt = np.unique(np.asarray(prompt, dtype=np.int64))
        self._start_over([])

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[M], a view."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """[M], a view."""
        return self._counts[: len(self._places)]

    def follow(self, output: list[int]) -> Self:
        """Count what came since the last call; anew where this is another list, or a shorter one than then."""
        if output is not self._output or len(output) < self._counted:
            self._start_over(output)
        for token in output[self._counted :]:  # one, as a rule
            place = self._places.get(token)
            if place is None:
                place = self._add(token)
            self._counts[place] += 1.0
        self._counted = len(output)
        return self

    def _start_over(self, output: list[int]) -> None:
        self._ids, self._counts = self._prompt, np.zeros(len(self._prompt))
        self._places = {token: place for place, token in enumerate(self._prompt.tolist())}
        self._output, self._counted = output, 0

    def _add(self, token: int) -> int:
        place = self._places[token] = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(place + _ROOM, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(place + _ROOM)))
        self._ids[place] = token
        return place

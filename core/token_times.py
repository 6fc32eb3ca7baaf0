"""When tokens came: of each step, how long requests waited for their first token and sequences for their next.

Gaps are counted by the time of the token before, of which a step has a few distinct ones, however many rows it has: who listens need
not look at rows. Must not know: plans, texts, who listens.
"""

from __future__ import annotations

from octavo.core.request import Sequence


class TokenTimes:
    """One for an engine. A step begins with `begin`, and `note` is told of each sequence that it gives tokens."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0  # of all requests that have their first token
        self.firsts: list[float] = []  # seconds from arrival to first token
        self._now = 0.0
        self._since: dict[float, int] = {}

    def begin(self, now: float) -> None:
        """Tokens of another step come now."""
        self._now = now
        self.firsts = []
        self._since = {}

    def note(self, sequence: Sequence) -> None:
        """The sequence has one or more new tokens."""
        request, now, last = sequence.request, self._now, sequence.last_token
        if last is not None:
            self._since[last] = self._since.get(last, 0) + 1
        elif request.first_token is None:
            request.first_token = now
            self.firsts.append(now - request.arrival)
            self.num_prompt_tokens += sequence.prompt_len
        sequence.last_token = now

    @property
    def gaps(self) -> dict[float, int]:
        """Seconds since the sequence's tokens before, and how many sequences had to wait so long."""
        return {self._now - since: count for since, count in self._since.items()}

"""When tokens came: of each step, how long requests waited for their first token and sequences for their next.

Gaps are counted by the time of the token before, of which a step has a few distinct ones, however many rows it has: who listens need
not look at rows. Must not know: plans, texts, who listens.
"""

from __future__ import annotations

from octavo.core.request import Request, Sequence


class TokenTimes:
    """One for an engine. A step begins with `begin`, and `note` is told of each sequence that it gives tokens.

    Of a beam search `begun` alone is told: beams have no gaps, since which tokens are the answer's is known at the end.
    """

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
            self.begun(request)
        sequence.last_token = now

    def begun(self, request: Request) -> None:
        """The request has its first token."""
        request.first_token = self._now
        self.firsts.append(self._now - request.arrival)
        self.num_prompt_tokens += len(request.prompt)

    @property
    def gaps(self) -> dict[float, int]:
        """Seconds since the sequence's tokens before, and how many sequences had to wait so long."""
        return {self._now - since: count for since, count in self._since.items()}

"""`PromptLookup`: guesses a sequence's next tokens from its own text, for speculative decoding without a draft model.

Where the last few tokens stood before, what followed them then may follow again: copied passages, edited code, tables, loops
(Saxena 2023, "Prompt Lookup Decoding"; vLLM's method `ngram`). `PlanBuilder` adds the guesses to the plan, the model checks all
of them in one step, and draws being functions of seed, sample and position, what is accepted is what would have been drawn.

Engines are assembled with one step in flight. With two, a sequence that brought drafts would sit out every other step (its next
start is not known before they are checked): right, tests run it, and slower than no drafts.

Must not know: plans, schedulers, allocators, torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

from octavo.core.request import Request, Sequence

Ends = dict[int, dict[tuple[int, ...], int]]
"""For each length n: n-gram -> one past its last occurrence."""


@dataclass(slots=True)
class _Known:
    """What was noted of one sequence's own tokens: the n-grams that end after the prompt's last-but-one token, up to `stop`."""

    output: list[int]  # the very list, to notice when a sequence gets another
    stop: int
    ends: Ends


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the sequence's last n tokens, of the longest n that has one.

    A step looks at the tokens that are new since the last one, whatever the length of the text; a prompt is noted once for all samples
    of its request. An index goes with its request and sequence, and preemption leaves it as it is, since no token changes.
    """

    def __init__(self, *, num_tokens: int, longest: int, shortest: int) -> None:
        self.num_tokens = num_tokens
        self._lengths = range(longest, shortest - 1, -1)
        self._prompts: WeakKeyDictionary[Request, Ends] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Sequence, _Known] = WeakKeyDictionary()

    def __call__(self, sequence: Sequence) -> list[int]:
        """Up to `num_tokens` ids; empty where nothing repeats."""
        stop = sequence.num_tokens
        end = self._latest_end(sequence, stop)
        if end is None:
            return []
        followed = sequence.tokens(end, min(end + self.num_tokens, stop))
        repeats = -(-self.num_tokens // len(followed))  # the occurrence reaches the end of the text: a loop, which goes on
        return (followed * repeats)[: self.num_tokens]

    def _latest_end(self, sequence: Sequence, stop: int) -> int | None:
        """Where the latest earlier occurrence of what ends at `stop` ends itself."""
        known, prompt = self._up_to(sequence, stop - 1), self._prompts[sequence.request]
        tail = sequence.tokens(max(stop - self._lengths[0], 0), stop)
        for n in self._lengths:
            if n < stop:
                gram = tuple(tail[-n:])
                end = known.ends[n].get(gram) or prompt[n].get(gram)
                if end is not None:
                    return end
        return None

    def _up_to(self, sequence: Sequence, stop: int) -> _Known:
        """Note all n-grams that end at `stop` or before, as far as they are new."""
        request, prompt_len = sequence.request, sequence.prompt_len
        if request not in self._prompts:
            self._prompts[request] = self._empty()
            _note(self._prompts[request], request.prompt[:-1], at=0, after=0)
        known = self._known.get(sequence)
        if known is None or known.output is not sequence.output or known.stop > stop:
            known = self._known[sequence] = _Known(sequence.output, prompt_len - 1, self._empty())
        if known.stop < stop:
            start = max(known.stop + 1 - self._lengths[0], 0)
            _note(known.ends, sequence.tokens(start, stop), at=start, after=known.stop)
            known.stop = stop
        return known

    def _empty(self) -> Ends:
        return {n: {} for n in self._lengths}


def _note(ends: Ends, tokens: Seq[int], *, at: int, after: int) -> None:
    """Note the n-grams that end behind `after`. `tokens` stand at positions `at` and on; of equal n-grams the last one counts."""
    for n, known in ends.items():
        start = max(after + 1 - n, at)
        window = tokens[start - at :]
        grams = zip(*(window[i:] for i in range(n)), strict=False)
        known.update(zip(grams, count(start + n), strict=False))

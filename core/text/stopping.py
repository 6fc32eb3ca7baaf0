"""When an output ends: by the id of its last token, by its length, or by a string in its text.

Two small machines, one of each for an output. A stop (not the length) counts once `min_tokens` tokens came before it; the sampler
masks stop ids until then, and these checks hold for whoever doesn't mask.

Must not know: the tokenizer, torch, the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

from octavo.core.sampling_params import SamplingParams, validate_for

FinishReason = Literal["stop", "length"]


def resolve_stop_ids(params: SamplingParams, *, eos_token_ids: Sequence[int], vocab_size: int) -> frozenset[int]:
    """The ids that end an output of this request. Raises RequestError: a stop id outside the vocabulary."""
    validate_for(params, vocab_size=vocab_size)
    return frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids))


class StopChecker:
    """Decides by ids and by length."""

    def __init__(self, *, params: SamplingParams, stop_ids: frozenset[int], max_tokens: int) -> None:
        """`max_tokens`: the request's own, or what the context leaves."""
        self._stop_ids = stop_ids
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens

    def check_token(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """`num_output_tokens` counts this token too."""
        if token_id in self._stop_ids and num_output_tokens > self._min_tokens:
            return "stop"
        return "length" if num_output_tokens >= self._max_tokens else None


class StopText:
    """Cuts a text at the first stop string to be completed, and holds back what might become one.

    "First completed" is what reading character by character would find, so the result doesn't depend on how the text was
    split into tokens. Of two that are completed by the same character, the one that began earlier counts.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop
        self._include = params.include_stop_str_in_output
        self._held = ""  # the longest end of the text that begins a stop string without being all of it
        self._beginnings = _beginnings(params.stop)
        self.matched: str | None = None

    def push(self, delta: str, *, searching: bool = True) -> tuple[str, bool]:
        """The text that may leave now, and whether a stop string was met. Without `searching`, none ends inside `delta`."""
        if not self._stops or not delta:
            return delta, False
        text = self._held + delta
        if searching and (cut := self._find(text)) is not None:
            self._held = ""
            return text[:cut], True
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Where to cut; None without a match. A match that ended in what was held had been seen, or wasn't looked for."""
        old = len(self._held)
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            if stop in text:  # most of the time none is, and this is the fastest way to know
                start = text.find(stop, max(0, old - len(stop) + 1))
                if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                    best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, self.matched = best
        return end if self._include else start

    def _partial(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string without being all of it."""
        for beginning in self._beginnings.get(text[-1], ()):
            if text.endswith(beginning):
                return len(beginning)
        return 0


@lru_cache(maxsize=16)  # all outputs of a request ask for the same, and often all requests do
def _beginnings(stops: tuple[str, ...]) -> Mapping[str, Sequence[str]]:
    """What may have to be held back, by its last character, longest first."""
    found = sorted({stop[:length] for stop in stops for length in range(1, len(stop))}, key=len, reverse=True)
    by_last: dict[str, list[str]] = {}
    for beginning in found:
        by_last.setdefault(beginning[-1], []).append(beginning)
    return by_last

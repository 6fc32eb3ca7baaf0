"""One output as its reader sees it: sampled ids in, text out, and the reason why it ended.

Joins the detokenizer, the stop ids, the length and the stop strings. Without a tokenizer it works on ids alone.

Must not know: requests, schedulers, torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.text.detokenizer import IncrementalDetokenizer
from octavo.core.text.stopping import FinishReason, StopChecker, StopText
from octavo.core.text.tokenizer import Tokenizer


class OutputText:
    """The text of one output sequence."""

    def __init__(self, tokenizer: Tokenizer | None, *, params: SamplingParams, stop_ids: frozenset[int], max_tokens: int) -> None:
        """`stop_ids` from `resolve_stop_ids`; `max_tokens`: the request's, or what the context leaves. Raises RequestError."""
        if tokenizer is None and params.stop:
            raise RequestError("stop strings need a tokenizer, and this engine runs on token ids alone: use stop_token_ids", field="stop")
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        )
        self._stop_text = StopText(params)
        self._check_token = StopChecker(params=params, stop_ids=stop_ids, max_tokens=max_tokens).check_token
        self._cuts = bool(params.stop)  # a stop string may be met, and what might become one is held back
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._parts: list[str] = []
        self.num_tokens = 0
        self.stop_reason: int | str | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, FinishReason | None, int]:
        """The text that may leave now, why the output ended (None: it goes on), and how many of the ids belong to it.

        The id of a stop token belongs to the output, its text doesn't unless `include_stop_str_in_output`. What follows the end
        in `token_ids` is dropped. The call that ends the output gives all that was held back; `finish` then has nothing left.
        """
        detokenizer = self._detokenizer
        if len(token_ids) == 1 and not self._cuts and detokenizer is not None:
            (token_id,) = token_ids
            if self._check_token(token_id, self.num_tokens + 1) is None:  # nearly all tokens: it goes on, and nothing is held back
                self.num_tokens += 1
                text = detokenizer.push(token_id)
                if text:
                    self._parts.append(text)
                return text, None, 1
        released = ""
        ended: FinishReason | None = None
        kept = 0
        for token_id in token_ids:
            kept += 1
            self.num_tokens += 1
            ended = self._check_token(token_id, self.num_tokens)
            delta, met = self._text_of(token_id, ended)
            released += delta
            if met:
                ended, self.stop_reason = "stop", self._stop_text.matched
            elif ended == "stop":
                self.stop_reason = token_id
            if ended is not None:
                break
        if released:
            self._parts.append(released)
        return released, ended, kept

    def finish(self) -> str:
        """All that was held back, when the output ends for a reason from outside, such as an abort."""
        if self._detokenizer is None:
            return ""
        rest, _ = self._last(self._detokenizer.finish())
        if rest:
            self._parts.append(rest)
        return rest

    @property
    def text(self) -> str:
        """All that was released so far."""
        return "".join(self._parts)

    def _text_of(self, token_id: int, ended: FinishReason | None) -> tuple[str, bool]:
        """What this token lets out, and whether a stop string was met in it."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", False
        delta = "" if ended == "stop" and not self._include_stop else detokenizer.push(token_id)
        if ended is not None:
            return self._last(delta + detokenizer.finish())
        text, met = self._stop_text.push(delta, searching=self.num_tokens > self._min_tokens)
        if met:
            detokenizer.finish()  # the beginning of a character after the cut
        return text, met

    def _last(self, delta: str) -> tuple[str, bool]:
        text, met = self._stop_text.push(delta, searching=self.num_tokens > self._min_tokens)
        return (text, True) if met else (text + self._stop_text.flush(), False)

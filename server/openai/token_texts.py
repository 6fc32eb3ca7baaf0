r"""Tokens as answers show them, with their log probabilities. A token may be a part of a character: its bytes are exact, and its text
writes what is no whole character as `\xf0`, as OpenAI does.

Must not know: requests, HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.logprobs import Logprob
from octavo.core.text.tokenizer import Tokenizer
from octavo.server.openai.chat_schema import ChoiceLogprobs, TokenLogprob, TopLogprob
from octavo.server.openai.completions_schema import CompletionLogprobs

Entries = Sequence[dict[int, Logprob] | None]
"""Of each token: the log probabilities of itself and the likeliest ones by id; None for the first of a prompt."""


@dataclass(slots=True)
class Place:
    """How far the text of one output has come."""

    length: int = 0  # whole characters
    begun: bool = False
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class TokenTexts:
    """Of one vocabulary. `skip_special_tokens`: whether the text that tokens make up is without special ones."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def for_chat(self, token_ids: Sequence[int], entries: Entries, place: Place) -> ChoiceLogprobs:
        """One object a token."""
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            first = not place.begun
            place.begun = True
            if entry is None:
                continue
            ranked = sorted(entry.items(), key=lambda item: (item[1].rank, item[0]))
            top = [self._top(token, value, first=first) for token, value in ranked if token != token_id or len(entry) > 1]
            content.append(TokenLogprob(**self._top(token_id, entry[token_id], first=first).model_dump(), top_logprobs=top))
        return ChoiceLogprobs(content=content)

    def _top(self, token_id: int, value: Logprob, *, first: bool) -> TopLogprob:
        data = self._tokenizer.token_bytes(token_id, first=first)
        return TopLogprob(token=data.decode("utf-8", "backslashreplace"), logprob=value.logprob, bytes=list(data))

    def for_completions(self, token_ids: Sequence[int], entries: Entries, place: Place, *, with_top: bool) -> CompletionLogprobs:
        """One column a property. An offset is where in the text the token begins, or the character that it is a part of."""
        table = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[] if with_top else None)
        for token_id, entry in zip(token_ids, entries, strict=True):
            first = not place.begun
            table.tokens.append(self._name(token_id, first=first))
            table.text_offset.append(place.length)
            table.token_logprobs.append(None if entry is None else entry[token_id].logprob)
            if table.top_logprobs is not None:
                table.top_logprobs.append(None if entry is None else self._named(entry, first=first))
            data = self._tokenizer.token_bytes(token_id, first=first, skip_special_tokens=self._skip)
            place.length += len(place.decoder.decode(data))
            place.begun = place.begun or bool(data)
        return table

    def _named(self, entry: dict[int, Logprob], *, first: bool) -> dict[str, float]:
        """By text; of two tokens with the same text the likelier one."""
        found: dict[str, float] = {}
        for token, value in sorted(entry.items(), key=lambda item: item[1].rank):
            found.setdefault(self._name(token, first=first), value.logprob)
        return found

    def _name(self, token_id: int, *, first: bool) -> str:
        data = self._tokenizer.token_bytes(token_id, first=first)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode("utf-8", "backslashreplace")

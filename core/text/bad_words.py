"""Texts that may not be generated, as token ids: worked out once, when a request is submitted.

Must not know: requests, the engine, logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.errors import RequestError

if TYPE_CHECKING:
    from octavo.core.text.tokenizer import Tokenizer

FIELD = "bad_words"


def resolve_bad_words(words: Sequence[str], *, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as at the start of a text and, where that is another word for the tokenizer, as behind a space: vLLM's rule.

    The second form counts if it begins with another token and has as many. Raises RequestError.
    """
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        if tokenizer is None:
            raise RequestError("bad_words are texts, and this engine has no tokenizer: use logit_bias with token ids", field=FIELD)
        bare = word.lstrip()
        first, second = (tuple(tokenizer.encode(text, add_special_tokens=False, field=FIELD)) for text in (bare, f" {bare}"))
        if not first:
            raise RequestError(f"bad_words[{index}] = {word!r}: gives no token that could be banned", field=FIELD)
        forms = [first, second] if len(second) == len(first) and second[0] != first[0] else [first]
        for ids in forms:
            strange = next((token for token in ids if not 0 <= token < vocab_size), None)
            if strange is not None:
                raise RequestError(
                    f"bad_words[{index}] = {word!r}: gives token {strange}, outside the vocabulary (0..{vocab_size - 1})", field=FIELD
                )
        found += forms
    return tuple(dict.fromkeys(found))

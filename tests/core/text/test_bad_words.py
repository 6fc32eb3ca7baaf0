"""Bad words as token ids, by vLLM's rule; what can't be banned is refused by name."""

from __future__ import annotations

import pytest

from octavo.core.errors import RequestError
from octavo.core.testing.small_tokenizers import KINDS
from octavo.core.text.bad_words import resolve_bad_words
from octavo.core.text.tokenizer import Tokenizer


def _tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), special_tokens={"bos_token": "<s>"}, eos_token_ids=(2,), chat_templates={})


def _by_hand(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    bare, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word.lstrip(), " " + word.lstrip()))
    return [bare, spaced] if len(bare) == len(spaced) and bare[0] != spaced[0] else [bare]


@pytest.mark.parametrize("kind", KINDS)
def test_with_and_without_a_leading_space(kind: str) -> None:
    """Both forms where they are as long and begin differently, however the word itself begins; no special token is added."""
    tokenizer = _tokenizer(kind)
    for word in ("world", " world", "the", "fox jumps", "o'clock", "Hello"):
        found = resolve_bad_words([word], tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
        assert list(found) == _by_hand(tokenizer, word)
        assert all(tokenizer.bos_token_id not in ids for ids in found)


def test_a_byte_level_word_has_two_forms() -> None:
    """As GPT-2 and SmolLM2 have them; a word that is given twice counts once."""
    tokenizer = _tokenizer("byte_level")
    forms = {tokenizer.decode(ids) for ids in resolve_bad_words(["h", " h", "h"], tokenizer=tokenizer, vocab_size=1000)}
    assert len(resolve_bad_words(["h", " h", "h"], tokenizer=tokenizer, vocab_size=1000)) == len(forms)
    assert forms >= {"h"}


@pytest.mark.parametrize(
    ("words", "vocab_size", "message"),
    [
        (["fine", " "], 1000, r"bad_words\[1\] = ' ': gives no token that could be banned"),
        (["\ud83d"], 1000, "bad_words holds half a surrogate pair"),
        (["world"], 10, r"bad_words\[0\] = 'world': gives token \d+, outside the vocabulary \(0..9\)"),
    ],
    ids=["blank", "surrogate", "outside"],
)
def test_words_that_cannot_be_banned_are_refused(words: list[str], vocab_size: int, message: str) -> None:
    """By the name of the parameter, which word, and why."""
    with pytest.raises(RequestError, match=message) as raised:
        resolve_bad_words(words, tokenizer=_tokenizer("byte_level"), vocab_size=vocab_size)
    assert raised.value.field == "bad_words"


def test_without_a_tokenizer() -> None:
    """Words are refused, their absence is not."""
    assert resolve_bad_words([], tokenizer=None, vocab_size=10) == ()
    with pytest.raises(RequestError, match="bad_words are texts, and this engine has no tokenizer: use logit_bias with token ids"):
        resolve_bad_words(["x"], tokenizer=None, vocab_size=10)

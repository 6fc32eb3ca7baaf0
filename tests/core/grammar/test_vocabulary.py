"""The bytes of tokens, against the tokenizers library: joined, they are what it decodes."""

from __future__ import annotations

import random

import pytest

from octavo.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.conftest import tokenizer

KINDS = ("bytes", "byte_level", "sentencepiece", "unigram", "wordpiece")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_joined_are_the_decoded_text(kind: str) -> None:
    """The first token's first form, then the others': `decode`, wherever the bytes are a text at all."""
    backend = tokenizer(kind)
    vocabulary = Vocabulary.of(backend, size=backend.vocab_size)
    rng, compared = random.Random(7), 0
    readable = [token_id for token_id in range(backend.vocab_size) if vocabulary.table[token_id]]
    single = [token_id for token_id in readable if vocabulary.table[token_id].isascii()]
    for number in range(3000):
        ids = rng.choices(single if number % 2 else readable, k=rng.randint(1, 6))
        first = vocabulary.table[vocabulary.first_ids[ids[0]]]
        if not first:
            continue  # a space that is dropped: the next token would still be the first one
        try:
            text = b"".join([first, *(vocabulary.table[token_id] for token_id in ids[1:])]).decode()
        except UnicodeDecodeError:
            continue
        assert backend.decode(ids) == text
        compared += 1
    assert compared > 1000


def test_first_forms_differ_where_the_decoder_drops_a_space() -> None:
    """Of SentencePiece and WordPiece some tokens have a second form; of byte-level ones none has."""
    sizes = {kind: len(Vocabulary.of(tokenizer(kind), size=tokenizer(kind).vocab_size).table) for kind in KINDS}
    more = {kind: sizes[kind] - tokenizer(kind).vocab_size - 1 for kind in KINDS}
    assert more["bytes"] == more["byte_level"] == 0
    assert min(more["sentencepiece"], more["unigram"], more["wordpiece"]) > 10

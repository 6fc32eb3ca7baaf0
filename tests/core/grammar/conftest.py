"""Compilers for the small tokenizers and for bare bytes, and a walk through a grammar at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers

from octavo.core.grammar.compiler import GrammarCompiler, Matcher, next_tokens
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.core.testing import small_tokenizers
from octavo.core.text.tokenizer import Tokenizer

SYNTAX = ['{"key": [1, 2.50, -3e7], "other_key": {"a": null}, "b": true, "c": "text with words"}', "(1 + 22) * 345 / 6 - 7890"] * 10
PADDING = 9  # ids that pad the model's vocabulary


@cache
def tokenizer(kind: str) -> Tokenizer:
    """A small tokenizer of this kind that can write JSON too; `bytes`: a token for each byte, and nothing else."""
    if kind == "bytes":
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return Tokenizer(backend, special_tokens={}, eos_token_ids=(), chat_templates={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_tokenizers, "TEXTS", SYNTAX + small_tokenizers.TEXTS)
        return Tokenizer(small_tokenizers.KINDS[kind](), special_tokens={}, eos_token_ids=(2,), chat_templates={})


@pytest.fixture(scope="session")
def compiler() -> Iterator[Callable[[str], GrammarCompiler]]:
    """By the tokenizer's kind."""
    made: dict[str, GrammarCompiler] = {}

    def make(kind: str) -> GrammarCompiler:
        if kind not in made:
            made[kind] = GrammarCompiler(tokenizer(kind), vocab_size=tokenizer(kind).vocab_size + PADDING)
        return made[kind]

    yield make
    for one in made.values():
        one.close()


def allowed(matcher: Matcher) -> list[int]:
    """The ids that may come next, the end aside."""
    (words,) = next_tokens([matcher])
    return [int(token_id) for token_id in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


class Walk:
    """An output drawn at random from what a grammar allows; `closing` tokens are preferred, ever more, so that it ends."""

    def __init__(self, matcher: Matcher, tokenizer: Tokenizer, *, seed: int, longest: int = 400) -> None:
        rng = random.Random(seed)
        self.ids: list[int] = []
        self.complete = False  # nothing could follow
        self.dead = False
        while len(self.ids) < longest:
            ids = allowed(matcher)
            haste = len(self.ids) / 60
            if matcher.can_end and (not ids or rng.random() < haste / 2 + 0.1):
                break
            if not ids:
                self.dead = True
                break
            closing = [token_id for token_id in ids if tokenizer.decode_token(token_id).strip()[:1] in ('"', "}", "]", ")")]
            self.ids.append(rng.choice(closing if closing and rng.random() < haste else ids))
            if matcher.accept(self.ids[-1:]):
                self.complete = True
                break
        self.ended = self.complete or (not self.dead and matcher.can_end)
        self.text = tokenizer.decode(self.ids)


def walk(compiler: Callable[[str], GrammarCompiler], kind: str, *, seed: int = 0, **wanted: Any) -> Walk:
    """Compile, and walk."""
    return Walk(compiler(kind).compile(StructuredOutputsParams(**wanted)).matcher(), tokenizer(kind), seed=seed)

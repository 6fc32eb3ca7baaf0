"""A tokenizer's vocabulary as a grammar sees it: bytes, not ids.

Decoders may treat the first token of a text in a way of its own (SentencePiece drops a leading space, WordPiece writes none before
it), and the text is what must follow the grammar. So a token that reads differently there has a second entry, behind the others, that
stands for it at the start:

    0 .. V-1   the model's ids, as they read in the middle of a text; special tokens and padding read as nothing
    V          the end of the output, which no model has
    V+1 ..     first forms that differ

Symbols: V logits, W = ceil(V / 32) words of a mask. Must not know: grammars, requests, torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from octavo.core.arrays import Ints
from octavo.core.grammar.notation import refused
from octavo.core.text.tokenizer import Tokenizer

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """`table`: the bytes of all entries. `first_ids` [V]: the entry of each token where it comes first."""

    size: int  # V
    table: list[bytes]
    first_ids: Ints

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, size: int) -> Vocabulary:
        """`size` is the number of logits. Raises RequestError: what a token reads as depends on its neighbours."""
        streams = tokenizer.streams(skip_special_tokens=True)
        known = range(min(size, tokenizer.vocab_size))
        table, first = [b""] * size + [b"<end of output>"], np.arange(size, dtype=np.int64)
        for token_id in known:
            middle, start = streams.token_bytes(token_id), streams.token_bytes(token_id, first=True)
            if middle is None or start is None:
                raise refused("this model's tokenizer writes a token differently before another one, which no grammar can follow yet")
            table[token_id] = middle
            if start != middle:
                first[token_id] = len(table)
                table.append(start)
        return cls(size, table, first)

    @property
    def end(self) -> int:
        """The entry of the output's end."""
        return self.size

    @property
    def mask_words(self) -> int:
        """Words of a mask over the model's ids."""
        return -(-self.size // 32)

    @cached_property
    def _readable(self) -> Words:
        """[W] the ids that read as something: whatever a grammar says of the others, they would leave no trace in the text."""
        return _pack(np.array([bool(self.table[token_id]) for token_id in range(self.size)]))

    def allowed(self, entries: Words) -> Words:
        """Of masks [S, words of the whole table], the part of the model's ids, in the middle of a text: [S, W]."""
        return entries[:, : self.mask_words] & self._readable

    def allowed_first(self, entries: Words) -> Words:
        """The same of one mask, at the start of a text: [W]."""
        return _pack(_unpack(entries)[self.first_ids]) & self._readable


def _unpack(words: Words) -> npt.NDArray[np.bool_]:
    return np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)


def _pack(bits: npt.NDArray[np.bool_]) -> Words:
    padded = np.zeros(-(-len(bits) // 32) * 32, dtype=np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)

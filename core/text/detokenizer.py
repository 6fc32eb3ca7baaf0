"""Text from token ids, one token at a time: the deltas joined are exactly `Tokenizer.decode` of all ids.

Why not `tokenizers.DecodeStream`: it raises or differs where a byte-fallback run turns out to be broken UTF-8, keeps the broken
tail of a stream to itself, and decodes a window at every step. Here, what a token adds to a text is computed once for each
vocabulary and looked up from then on. Three kinds of decoders need three streams:

    byte level (GPT-2, Llama 3, Qwen)             a token is bytes: decode UTF-8 incrementally
    pieces (SentencePiece, unigram, WordPiece)    a token is text that depends on no other, except the first one and
                                                  runs of byte-fallback tokens, which mean something only as a whole
    whatever else (`</w>` suffixes, CTC)          decode what is new together with the tokens before it

A run of byte-fallback tokens comes out when the run ends: one bad byte turns all its characters into U+FFFD.

Must not know: the engine, stop strings, torch.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers

    from octavo.core.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Ids of one output sequence in, text out. Keeps what it needs to go on, not what it handed out."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> None:
        """Where special tokens are shown, `spaces_between_special_tokens = False` takes away the spaces that a decoder puts between
        two added tokens (as in vLLM: whether there are any is the decoder's choice, and byte-level ones put none)."""
        stream = tokenizer.streams(skip_special_tokens=skip_special_tokens).open()
        if not (skip_special_tokens or spaces_between_special_tokens):
            stream = _Unspaced(stream, tokenizer.added_tokens, vocab_size=tokenizer.vocab_size)
        self._push, self._finish = stream.push, stream.finish

    def push(self, token_id: int) -> str:
        """The text that this token adds, "" while a character is incomplete."""
        return self._push(token_id)

    def finish(self) -> str:
        """The rest, when no token follows: an incomplete character comes out as U+FFFD."""
        return self._finish()


class Stream(Protocol):
    """One sequence's way from ids to text."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Streams(Protocol):
    """What the sequences of one vocabulary share: text of tokens met before."""

    def open(self) -> Stream: ...

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes | None:
        """What a token adds to a text, or to an empty one (`first`); b"" if nothing, None if that depends on its neighbours."""
        ...


def streams_for(tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> Streams:
    """The kind of stream that this tokenizer's decoder needs."""
    vocabulary = _Vocabulary(tokenizer, skip_special_tokens=skip_special_tokens)
    steps = list(_decoder_steps(tokenizer))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteStreams(vocabulary)
    if _tokens_stay_apart(steps):
        byte_ids = _byte_fallback_ids(tokenizer) if any(step["type"] == "ByteFallback" for step in steps) else frozenset()
        anchor = _find_anchor(vocabulary, byte_ids)
        if anchor is not None:
            return _PieceStreams(vocabulary, byte_ids=byte_ids, anchor=anchor)
    return _ContextStreams(vocabulary)


class _Vocabulary:
    """The few questions that streams ask of a tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self.added = frozenset(added)
        self._special = frozenset(i for i, token in added.items() if token.special) if skip_special_tokens else frozenset()
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)

    def token(self, token_id: int) -> str | None:
        """None for a token that leaves no trace: skipped, or an id that only pads the model's vocabulary."""
        return None if token_id in self._special else self._tokenizer.id_to_token(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class _Unspaced:
    """A stream, and no space between added tokens that stand next to each other."""

    def __init__(self, stream: Stream, added: Mapping[int, str], *, vocab_size: int) -> None:
        self._stream = stream
        self._added = added
        self._vocab_size = vocab_size
        self._after_added = False

    def push(self, token_id: int) -> str:
        text = self._stream.push(token_id)
        own = self._added.get(token_id)
        if own is not None and self._after_added and text.endswith(own) and text[: -len(own)].isspace():
            text = own
        if token_id < self._vocab_size:  # others leave no trace, and do not stand between; one that is held back does
            self._after_added = own is not None
        return text

    def finish(self) -> str:
        return self._stream.finish()


# Byte level


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class _ByteStreams:
    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._byte_of = _bytes_of_characters()
        self.texts: dict[int, str] = {}  # tokens that are whole characters by themselves
        self._bytes: dict[int, bytes] = {}

    def open(self) -> Stream:
        return _ByteStream(self)

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes | None:
        return self.bytes_of(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            token = self._vocabulary.token(token_id) or ""
            try:
                data = bytes(self._byte_of[character] for character in token)
            except KeyError:  # an added token, written in plain text
                data = token.encode()
            self._bytes[token_id] = data
        return data


class _ByteStream:
    def __init__(self, shared: _ByteStreams) -> None:
        self._shared = shared
        self._texts = shared.texts
        self._rest = b""  # the beginning of a character, at most 3 bytes

    def push(self, token_id: int) -> str:
        rest = self._rest
        if not rest:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        data = rest + self._shared.bytes_of(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        if not rest and not self._rest:
            self._texts[token_id] = text
        return text

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self._rest, "replace", True)
        self._rest = b""
        return text


# Pieces


class _PieceStreams:
    def __init__(self, vocabulary: _Vocabulary, *, byte_ids: frozenset[int], anchor: int) -> None:
        self.vocabulary = vocabulary
        self.byte_ids = byte_ids
        self.pieces: dict[int, str] = {}  # tokens that are text by themselves, where they are not the first one
        self._anchor = anchor
        self._anchor_length = len(vocabulary.decode([anchor]))

    def open(self) -> Stream:
        return _PieceStream(self)

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes | None:
        token = self.vocabulary.token(token_id)
        if token is None:
            return b""
        text = self.vocabulary.decode([token_id]) if first else self.decode_after_start([token_id])
        return bytes([int(token[3:5], 16)]) if text and token_id in self.byte_ids else text.encode()

    def decode_after_start(self, token_ids: list[int]) -> str:
        """What the tokens add to a text that has begun: decoders treat the first token in a way of its own."""
        return self.vocabulary.decode([self._anchor, *token_ids])[self._anchor_length :]


class _PieceStream:
    def __init__(self, shared: _PieceStreams) -> None:
        self._shared = shared
        self._pieces = shared.pieces
        self._held: list[int] = []  # a byte-fallback run, or first tokens that gave no text yet
        self._begun = False

    def push(self, token_id: int) -> str:
        if self._begun and not self._held:
            piece = self._pieces.get(token_id)
            if piece is not None:
                return piece
        shared = self._shared
        if shared.vocabulary.token(token_id) is None:  # leaves no trace, so it doesn't end a run either
            return ""
        self._held.append(token_id)
        return "" if token_id in shared.byte_ids else self._release()

    def finish(self) -> str:
        return self._release() if self._held else ""

    def _release(self) -> str:
        held, shared = self._held, self._shared
        if self._begun:
            text = shared.decode_after_start(held)
            if len(held) == 1 and held[0] not in shared.byte_ids:
                self._pieces[held[0]] = text
        else:
            text = shared.vocabulary.decode(held)
            if not text:  # a stripped space: the next token still is at the start
                return ""
            self._begun = True
        self._held = []
        return text


# Whatever else


class _ContextStreams:
    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary

    def open(self) -> Stream:
        return _ContextStream(self._vocabulary)

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes | None:
        return None


class _ContextStream:
    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []  # the tokens of the last delta
        self._held: list[int] = []
        self._before = ""  # text of the context alone

    def push(self, token_id: int) -> str:
        if self._vocabulary.token(token_id) is None:
            return ""
        self._held.append(token_id)
        text = self._vocabulary.decode([*self._context, *self._held])
        if text.endswith("\ufffd") or len(text) <= len(self._before) or not text.startswith(self._before):
            return ""
        delta = text[len(self._before) :]
        self._context, self._held = self._held, []
        self._before = self._vocabulary.decode(self._context)
        return delta

    def finish(self) -> str:
        if not self._held:
            return ""
        text = self._vocabulary.decode([*self._context, *self._held])
        self._held = []
        return text[len(self._before) :]


# Which kind


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    """The decoder as tokenizer.json describes it, sequences flattened; nothing where there is no decoder."""
    if tokenizer.decoder is None:
        return
    waiting = [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = step["decoders"] + waiting
        else:
            yield step


def _tokens_stay_apart(steps: list[dict[str, Any]]) -> bool:
    """Whether each token, or byte-fallback run, gives the same text wherever it stands after the first one.

    Before `Fuse` the steps see one token at a time, after it the whole text: there only what can't reach across tokens passes.
    """
    fused = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Metaspace" | "WordPiece" | "ByteFallback" if not fused:
                pass
            case "Strip" if not fused or step["stop"] == 0:
                pass
            case "Replace" if not fused or len(step["pattern"].get("String", "")) == 1:
                pass
            case _:
                return False
    return True


def _byte_fallback_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    names = (f"<0x{digits}>" for byte in range(256) for digits in (f"{byte:02X}", f"{byte:02x}"))
    return frozenset(token_id for name in names if (token_id := tokenizer.token_to_id(name)) is not None)


def _find_anchor(vocabulary: _Vocabulary, byte_ids: frozenset[int]) -> int | None:
    """A plain word piece that stands for "the text so far": one that doesn't change when others follow."""
    for token_id in range(vocabulary.size):
        if token_id in vocabulary.added or token_id in byte_ids or vocabulary.token(token_id) is None:
            continue
        text = vocabulary.decode([token_id])
        if text and text[-1].isalnum() and vocabulary.decode([token_id, token_id]).startswith(text):
            return token_id
    return None

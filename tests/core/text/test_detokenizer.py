"""Deltas joined are the full decode, for any ids, under every kind of decoder; a character comes out whole or not at all."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Backend, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from octavo.core.testing.small_tokenizers import KINDS, SPECIAL_TOKENS
from octavo.core.text.detokenizer import IncrementalDetokenizer
from octavo.core.text.tokenizer import Tokenizer

TEXT = "Hello, 안녕하세요 세계! 你好世界 😀👩‍👩‍👧🇰🇷 naïve ﷽ \n\n\tx ** 2 � isn't"

FOUR_TOKENS = "𐍈"  # a letter whose bytes no merge of the small byte-level tokenizer joins

all_kinds = pytest.mark.parametrize("kind", KINDS)


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(), chat_templates={})


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return wrap(KINDS[kind]())


def deltas(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool, spaces: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    return [stream.push(token_id) for token_id in token_ids] + [stream.finish()]


@cache
def in_transformers(kind: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(tokenizer_of(kind)._backend.to_str()))


@cache
def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids at random (two of them only pad the model's vocabulary), with special ones and pieces of real text mixed in."""
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    slices = st.tuples(st.integers(0, len(text_ids)), st.integers(1, 12)).map(lambda cut: text_ids[cut[0] : cut[0] + cut[1]])
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=8)
    special = st.lists(st.integers(0, len(SPECIAL_TOKENS)), max_size=2)
    return st.lists(slices | anything | special, max_size=6).map(lambda parts: [token_id for part in parts for token_id in part])


@all_kinds
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_deltas_joined_are_the_full_decode(kind: str, data: st.DataObject) -> None:
    """Whatever the ids, in every decoder, with special tokens and without (fault 38)."""
    tokenizer = tokenizer_of(kind)
    token_ids = data.draw(ids_of(tokenizer))
    for skip in (True, False):
        assert "".join(deltas(tokenizer, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@all_kinds
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_full_decode_is_that_of_transformers(kind: str, data: st.DataObject) -> None:
    """With clean_up_tokenization_spaces = False: nothing is tidied behind the decoder's back."""
    token_ids = data.draw(ids_of(tokenizer_of(kind)))
    for skip in (True, False):
        expected = in_transformers(kind).decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer_of(kind).decode(token_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize(
    ("kind", "spaced", "joined"),
    [
        ("wordpiece", "the </s> <s> <|im_end|> the", "the </s><s><|im_end|> the"),
        ("byte_level", "the</s><s><|im_end|>the", "the</s><s><|im_end|>the"),
        ("sentencepiece", "the</s><s><|im_end|> the", "the</s><s><|im_end|> the"),
    ],
)
def test_spaces_between_special_tokens(kind: str, spaced: str, joined: str) -> None:
    """Where the decoder writes some, they can be had without: between special tokens that are shown, and nowhere else."""
    tokenizer = tokenizer_of(kind)
    word = tokenizer.encode("the", add_special_tokens=False)
    token_ids = [*word, *(SPECIAL_TOKENS.index(token) for token in ("</s>", "<s>", "<|im_end|>")), *word]
    assert "".join(deltas(tokenizer, token_ids, skip=False)) == spaced
    assert "".join(deltas(tokenizer, token_ids, skip=False, spaces=False)) == joined
    hidden = deltas(tokenizer, token_ids, skip=True)
    assert deltas(tokenizer, token_ids, skip=True, spaces=False) == hidden


def test_a_byte_that_is_held_back_stands_between() -> None:
    """A byte may be white space by itself: it is no decoder's space between special tokens."""
    tokenizer = tokenizer_of("sentencepiece")
    for byte in ("<0x1C>", "<0x20>"):
        token_ids = [0, KINDS["sentencepiece"]().token_to_id(byte), 0]
        assert "".join(deltas(tokenizer, token_ids, skip=False, spaces=False)) == "".join(deltas(tokenizer, token_ids, skip=False))


@all_kinds
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_only_spaces_between_special_tokens_go(kind: str, data: st.DataObject) -> None:
    """For any ids: the same text but for spaces, the very same where no two added tokens meet, and none between two that do."""
    tokenizer = tokenizer_of(kind)
    token_ids = data.draw(ids_of(tokenizer))
    plain = "".join(deltas(tokenizer, token_ids, skip=False))
    text = "".join(deltas(tokenizer, token_ids, skip=False, spaces=False))
    assert text.replace(" ", "") == plain.replace(" ", "")
    shown = [token_id for token_id in token_ids if token_id < tokenizer.vocab_size]
    met = [(a, b) for a, b in itertools.pairwise(shown) if a in tokenizer.added_tokens and b in tokenizer.added_tokens]
    assert met or text == plain
    for a, b in met:
        assert tokenizer.added_tokens[a] + tokenizer.added_tokens[b] in text


def test_why_this_is_no_decode_stream() -> None:
    """ADR 4: the library's own stream keeps a broken tail to itself, and raises where bytes of a fallback run turn out to be broken.

    When this fails, it has learnt better: compare again.
    """
    tokenizer = tokenizer_of("byte_level")
    broken = tokenizer.encode(FOUR_TOKENS)[:2]
    theirs = DecodeStream(skip_special_tokens=True)
    assert [theirs.step(KINDS["byte_level"](), token_id) for token_id in broken] == [None, None]
    assert "".join(deltas(tokenizer, broken, skip=True)) == tokenizer.decode(broken) == "\ufffd"
    backend = KINDS["sentencepiece"]()
    emoji = backend.encode("😀", add_special_tokens=False).ids[-4:]
    theirs = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        for token_id in [*emoji, emoji[0], backend.token_to_id("T"), emoji[0], backend.token_to_id("T")]:
            theirs.step(backend, token_id)


@all_kinds
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_real_text_survives(kind: str, text: str) -> None:
    """What the tokenizer made of a text comes back as the library's own decode gives it."""
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text)
    assert "".join(deltas(tokenizer, token_ids, skip=True)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aé세界😀👩‍👧🇰🇷 \n"), max_size=20))
def test_no_replacement_character_before_a_character_is_whole(kind: str, text: str) -> None:
    """Characters split over tokens: no delta holds U+FFFD, and none has to be taken back (fault 38)."""
    tokenizer = tokenizer_of(kind)
    parts = deltas(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip=True)
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text


def test_a_split_emoji_comes_out_with_its_last_byte() -> None:
    """Byte level: three empty deltas, then the emoji, with nothing to follow."""
    tokenizer = tokenizer_of("byte_level")
    assert deltas(tokenizer, tokenizer.encode(FOUR_TOKENS), skip=True) == ["", "", "", FOUR_TOKENS, ""]
    assert deltas(tokenizer, tokenizer.encode(FOUR_TOKENS)[:2], skip=True) == ["", "", "\ufffd"]


def test_a_byte_fallback_run_is_judged_as_a_whole() -> None:
    """SentencePiece: a bad byte spoils its whole run, so the run waits for its end; a skipped token doesn't end it."""
    tokenizer = tokenizer_of("sentencepiece")
    emoji = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    letter = tokenizer.encode("T", add_special_tokens=False)[-1]
    assert deltas(tokenizer, [letter, *emoji, letter], skip=True) == ["T", "", "", "", "", "😀T", ""]
    assert deltas(tokenizer, [letter, *emoji, emoji[0], letter], skip=True)[-2:] == ["\ufffd" * 5 + "T", ""]
    special = SPECIAL_TOKENS.index("</s>")
    assert deltas(tokenizer, [letter, *emoji[:2], special, *emoji[2:], letter], skip=True)[-2:] == ["😀T", ""]


def test_spaces_between_sentencepiece_words_survive() -> None:
    """One token at a time, only the very first space is the decoder's to strip (fault 39)."""
    tokenizer = tokenizer_of("sentencepiece")
    words = [tokenizer.encode(word, add_special_tokens=False) for word in ("the", "world", "of", "words")]
    parts = deltas(tokenizer, [token_id for word in words for token_id in word], skip=True)
    assert "".join(parts) == "the world of words"
    assert parts[0] == "the"[: len(parts[0])]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Fuse(),
        decoders.CTC(pad_token="<pad>"),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", ""), decoders.Fuse()]),
        decoders.WordPiece(cleanup=False),
    ],
    ids=repr,
)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rare_decoders_too(decoder: decoders.Decoder | None, data: st.DataObject) -> None:
    """No decoder, and steps before and after `Fuse`: nothing is lost and nothing repeated."""
    words = ["<pad>", "a", "b", "##c", "▁", "▁d", "e▁", "  f", " ", "g ", "n't", "h"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = wrap(backend)
    token_ids = data.draw(st.lists(st.integers(0, len(words)), max_size=12))
    assert "".join(deltas(tokenizer, token_ids, skip=True)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize(
    ("strip", "expected"),
    [
        (decoders.Strip(" ", 2, 0), ["", "", "a", " ", "b", ""]),
        (decoders.Strip(" ", 0, 1), ["", " ", " a", "", " b", ""]),
    ],
    ids=["left", "right"],
)
def test_spaces_stripped_from_the_whole_text(strip: decoders.Decoder, expected: list[str]) -> None:
    """At the start they may belong to several tokens; at the end, a space waits until something follows."""
    backend = Backend(models.WordLevel({" ": 0, "a": 1, "b": 2}, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), strip])
    parts = deltas(wrap(backend), [0, 0, 1, 0, 2], skip=True)
    assert "".join(parts) == backend.decode([0, 0, 1, 0, 2])
    assert parts == expected


def test_streams_of_one_tokenizer_do_not_meet() -> None:
    """Sequences share what tokens were looked up, never what they hold back."""
    tokenizer = tokenizer_of("byte_level")
    letter = tokenizer.encode(FOUR_TOKENS)
    one, other = (IncrementalDetokenizer(tokenizer, skip_special_tokens=True) for _ in range(2))
    for token_id in letter[:3]:
        assert one.push(token_id) == ""
    assert other.push(tokenizer.encode("a")[0]) == "a"
    assert one.push(letter[3]) == FOUR_TOKENS
    assert (one.finish(), other.finish()) == ("", "")


def test_what_waits_stays_small() -> None:
    """Broken bytes without end: at most three of them wait, so a step's cost doesn't grow with the text."""
    tokenizer = tokenizer_of("byte_level")
    lead = tokenizer.encode(FOUR_TOKENS)[0]
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    out = "".join(stream.push(lead) for _ in range(1000))
    assert len(out) >= 999

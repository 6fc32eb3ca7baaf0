"""Ids in, text and finish reason out: however many ids a step brings, the output is the one of a step for each."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.small_tokenizers import KINDS
from octavo.core.text.output_text import OutputText
from octavo.core.text.tokenizer import Tokenizer

EOS = 2  # "</s>"
TEXT = "Hello world, 안녕하세요 세계! 😀 the end.\nUser: hi"


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), special_tokens={}, eos_token_ids=(EOS,), chat_templates={})


def output(kind: str, *, max_tokens: int = 1000, stop_ids: tuple[int, ...] = (EOS,), **params: Any) -> OutputText:
    made = SamplingParams(max_tokens=max_tokens, **params)
    return OutputText(tokenizer_of(kind), params=made, stop_ids=frozenset(stop_ids), max_tokens=max_tokens)


def run(out: OutputText, steps: list[list[int]]) -> tuple[str, str | None, int]:
    """Text, reason and number of tokens after all steps, the stream's deltas joined."""
    deltas, total = [], 0
    for step in steps:
        delta, reason, kept = out.push(step)
        deltas.append(delta)
        total += kept
        if reason is not None:
            assert out.finish() == ""
            break
    else:
        reason = None
        deltas.append(out.finish())
    assert out.text == "".join(deltas)
    assert out.num_tokens == total
    return out.text, reason, total


def ids(kind: str, text: str = TEXT) -> list[int]:
    return tokenizer_of(kind).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_is_the_full_decode_cut_at_the_first_stop_string(kind: str, data: st.DataObject) -> None:
    """Any ids in steps of any size, any stop strings taken from their text: cut exactly, nothing lost (faults 28, 29, 30, 38)."""
    tokenizer = tokenizer_of(kind)
    token_ids = data.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1) | st.sampled_from(ids(kind)), min_size=1, max_size=16))
    text = tokenizer.decode(token_ids)
    begin = st.integers(0, max(0, len(text) - 1))
    stops = data.draw(st.lists(st.tuples(begin, st.integers(1, 4)).map(lambda cut: text[cut[0] : sum(cut)] or "?"), max_size=3))
    include = data.draw(st.booleans())
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, minus_length, stop = min(ends, default=(len(text), 0, None))

    steps = [[token_id] for token_id in token_ids]
    if data.draw(st.booleans()):
        size = data.draw(st.integers(1, 5))
        steps = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
    out = output(kind, max_tokens=len(token_ids), stop=stops, include_stop_str_in_output=include)
    got, reason, kept = run(out, steps)
    assert got == (text[:end] if include else text[: end + minus_length])
    assert (reason, out.stop_reason) == (("stop", stop) if stop else ("length", None))
    assert kept <= len(token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_several_ids_in_one_step_are_cut_after_the_one_that_ends(kind: str) -> None:
    """Accepted drafts: what follows the end is dropped, the count says how many are kept."""
    hello = ids(kind, "Hello world")
    assert output(kind).push([*hello, EOS, *hello])[1:] == ("stop", len(hello) + 1)
    assert output(kind, max_tokens=2).push([*hello, *hello])[1:] == ("length", 2)
    assert output(kind, stop="Hello").push([*hello, *hello, *hello])[1] == "stop"
    assert output(kind).push(hello)[1:] == (None, len(hello))


def test_the_end_of_a_stop_string_ends_the_ids() -> None:
    """The token that completes it is the last one, also where more came in the same step."""
    token_ids = ids("byte_level", "abcXYZabc")
    one_by_one = run(output("byte_level", stop="XYZ"), [[token_id] for token_id in token_ids])
    assert one_by_one == run(output("byte_level", stop="XYZ"), [token_ids])
    assert one_by_one[:2] == ("abc", "stop")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_tokens_text(include: bool) -> None:
    """Left out unless asked for; its id counts either way, and `stop_reason` holds it."""
    hello, world = ids("byte_level", "Hello"), ids("byte_level", " world")
    out = output("byte_level", stop_ids=(world[-1],), include_stop_str_in_output=include)
    text, reason, kept = run(out, [[*hello, *world]])
    whole = tokenizer_of("byte_level").decode([*hello, *world])
    assert text == (whole if include else tokenizer_of("byte_level").decode([*hello, *world[:-1]]))
    assert (reason, kept, out.stop_reason) == ("stop", len(hello) + len(world), world[-1])


@pytest.mark.parametrize(("last", "reason"), [([EOS], "stop"), ([], "length")])
def test_what_was_held_back_comes_out_at_the_end(last: list[int], reason: str) -> None:
    """A beginning of a stop string and of a character, at EOS and at length (fault 30)."""
    token_ids = [*ids("byte_level", "Hi\nUs"), *ids("byte_level", "𐍈")[:2], *last]
    out = output("byte_level", stop="\nUser:", max_tokens=len(token_ids))
    assert run(out, [[token_id] for token_id in token_ids])[:2] == ("Hi\nUs\ufffd", reason)


def test_a_stop_string_in_what_waited_for_the_end() -> None:
    """SentencePiece: a newline is a byte token and waits for its run to end; at length it still is found, and cut."""
    newline = ids("sentencepiece", "\n")[-1]
    out = output("sentencepiece", stop="\n", max_tokens=3)
    assert run(out, [[ids("sentencepiece", "T")[-1]], [newline], [newline]]) == ("T", "stop", 3)
    assert out.stop_reason == "\n"


def test_nothing_comes_after_a_stop_string() -> None:
    """The beginning of a character after the cut is not flushed behind it."""
    backend_ids = [*ids("byte_level", "aX"), ids("byte_level", "𐍈")[0]]
    out = output("byte_level", stop="X")
    assert run(out, [backend_ids]) == ("a", "stop", len(ids("byte_level", "aX")))


def test_an_abort_gets_what_was_held_back() -> None:
    """`finish` without an end: a half stop string belongs to the text."""
    out = output("byte_level", stop="world!")
    assert out.push(ids("byte_level", "Hello wor")) == ("Hello ", None, len(ids("byte_level", "Hello wor")))
    assert out.finish() == "wor"
    assert out.text == "Hello wor"


def test_min_tokens_holds_for_ids_and_strings() -> None:
    """That many tokens come before anything may end the output (fault 31)."""
    a = ids("byte_level", "a")
    assert len(a) == 1
    out = output("byte_level", stop="a", stop_ids=(EOS,), min_tokens=3)
    assert [out.push(step) for step in (a, [EOS], a)] == [("a", None, 1), ("", None, 1), ("a", None, 1)]
    assert out.push(a) == ("", "stop", 1)
    out = output("byte_level", min_tokens=3)
    assert [out.push([EOS])[1] for _ in range(4)] == [None, None, None, "stop"]


def test_every_eos_id_stops() -> None:
    """A generation config with several (fault 31)."""
    for token_id in (2, 4):
        out = output("byte_level", stop_ids=(2, 4))
        assert out.push([token_id]) == ("", "stop", 1)
        assert out.stop_reason == token_id


def test_special_tokens_as_asked() -> None:
    """An EOS that doesn't stop is left out of the text, or shown."""
    token_ids = [*ids("byte_level", "a"), EOS, *ids("byte_level", "b")]
    assert run(output("byte_level", stop_ids=()), [token_ids])[0] == "ab"
    assert run(output("byte_level", stop_ids=(), skip_special_tokens=False), [token_ids])[0] == "a</s>b"


def test_without_a_tokenizer() -> None:
    """Ids and lengths work, the text is empty, stop strings are refused."""
    out = OutputText(None, params=SamplingParams(), stop_ids=frozenset({7}), max_tokens=16)
    assert [out.push([5, 6]), out.push([7, 8])] == [("", None, 2), ("", "stop", 1)]
    assert (out.text, out.finish(), out.stop_reason) == ("", "", 7)
    with pytest.raises(RequestError, match="stop strings need a tokenizer, and this engine runs on token ids alone: use stop_token_ids"):
        OutputText(None, params=SamplingParams(stop="a"), stop_ids=frozenset(), max_tokens=16)


def test_special_tokens_with_and_without_spaces() -> None:
    """The params reach the detokenizer."""
    tokens = [*ids("wordpiece", "the"), 2, 1, *ids("wordpiece", "the")]
    for params, text in (
        ({}, "the the"),
        ({"skip_special_tokens": False}, "the </s> <s> the"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "the </s><s> the"),
        ({"spaces_between_special_tokens": False}, "the the"),
    ):
        assert run(output("wordpiece", stop_ids=(), **params), [tokens])[0] == text

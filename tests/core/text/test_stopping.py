"""An output ends at a stop id, at its length, or where the first stop string is completed; nothing of a stop string leaks."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.text.stopping import StopChecker, StopText, resolve_stop_ids


def cut(text: str, stops: list[str], *, include: bool, exempt: int = 0) -> tuple[str, str | None]:
    """The rule, written down naively: the first end of a match beyond `exempt` characters; of two, the longer match."""
    for end in range(exempt + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def released(parts: list[str], stops: list[str], *, include: bool, exempt_parts: int = 0) -> tuple[str, str | None, list[str]]:
    stop_text = StopText(SamplingParams(stop=stops, include_stop_str_in_output=include))
    out: list[str] = []
    for index, part in enumerate(parts):
        text, met = stop_text.push(part, searching=index >= exempt_parts)
        out.append(text)
        if met:
            break
    else:
        out.append(stop_text.flush())
    return "".join(out), stop_text.matched, out


letters = st.text(st.sampled_from("ab한"), max_size=4)
stop_lists = st.lists(st.text(st.sampled_from("ab한"), min_size=1, max_size=4), max_size=4)


@settings(max_examples=600, deadline=None)
@given(parts=st.lists(letters, max_size=8), stops=stop_lists, include=st.booleans())
@example(parts=["abcd"], stops=["abcd", "bc"], include=False)
@example(parts=["a", "b", "c"], stops=["abc"], include=False)
def test_any_split_of_a_text_gives_the_same_cut(parts: list[str], stops: list[str], include: bool) -> None:
    """Over tokens and inside them, the text is cut at the first completed stop string (faults 28, 29), else all of it comes out (30)."""
    text, matched, _ = released(parts, stops, include=include)
    assert (text, matched) == cut("".join(parts), stops, include=include)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(letters, max_size=8), stops=stop_lists, include=st.booleans(), exempt=st.integers(0, 8))
def test_none_is_looked_for_before_min_tokens(parts: list[str], stops: list[str], include: bool, exempt: int) -> None:
    """A stop string that was complete by then never counts; one that began by then and is completed later does."""
    text, matched, _ = released(parts, stops, include=include, exempt_parts=exempt)
    assert (text, matched) == cut("".join(parts), stops, include=include, exempt=len("".join(parts[:exempt])))


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(letters, max_size=8), stops=stop_lists)
def test_nothing_of_a_stop_string_leaks_and_nothing_else_waits(parts: list[str], stops: list[str]) -> None:
    """After each delta exactly that end of the text is held which may become a stop string (fault 28)."""
    _, _, out = released(parts, stops, include=False)
    for seen in range(1, len(out)):
        text = "".join(parts[:seen])
        if cut(text, stops, include=False)[1] is not None:
            break
        waiting = max((n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])), default=0)
        assert "".join(out[:seen]) == text[: len(text) - waiting]


def test_a_held_beginning_comes_out_when_it_does_not_match() -> None:
    """One delta late, not lost (fault 28)."""
    stop_text = StopText(SamplingParams(stop="\nUser:"))
    assert [stop_text.push(delta) for delta in ("Hi", "\nUs", "ed", "\n")] == [("Hi", False), ("", False), ("\nUsed", False), ("", False)]
    assert stop_text.flush() == "\n"
    assert stop_text.flush() == ""


def test_stop_ids_of_a_request() -> None:
    """All EOS ids of the generation config and the request's own; with `ignore_eos` only its own, even if one is an EOS (fault 31)."""
    assert resolve_stop_ids(SamplingParams(stop_token_ids=[9]), eos_token_ids=(2, 3), vocab_size=10) == {2, 3, 9}
    assert resolve_stop_ids(SamplingParams(stop_token_ids=[3], ignore_eos=True), eos_token_ids=(2, 3), vocab_size=10) == {3}
    with pytest.raises(RequestError, match="stop_token_ids holds 10: "):
        resolve_stop_ids(SamplingParams(stop_token_ids=[10]), eos_token_ids=(2, 3), vocab_size=10)


def test_ids_and_length() -> None:
    """Any stop id ends the output, none of the first `min_tokens` does, and a stop at the last token is a stop (fault 31)."""
    checker = StopChecker(params=SamplingParams(min_tokens=2), stop_ids=frozenset({2, 3}), max_tokens=4)
    assert [checker.check_token(2, count) for count in (1, 2, 3, 4)] == [None, None, "stop", "stop"]
    assert [checker.check_token(3, count) for count in (2, 3)] == [None, "stop"]
    assert [checker.check_token(7, count) for count in (1, 3, 4)] == [None, None, "length"]

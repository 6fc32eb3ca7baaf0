"""Expressions, choices and Lark grammars; and what all kinds have in common."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.core.grammar import compiler as compiler_module
from octavo.core.grammar.compiler import GrammarCompiler, GrammarError, next_tokens
from octavo.core.structured_outputs import StructuredOutputsParams
from tests.core.grammar.conftest import PADDING, allowed, tokenizer, walk

Compilers = Callable[[str], GrammarCompiler]
KINDS = ("byte_level", "sentencepiece", "unigram", "wordpiece")

REGEXES = [
    r"(yes|no|maybe not)",
    r"[a-z]+@[a-z]+\.(com|org)",
    r"[0-9]{3}-[0-9]{4}",
    r" ?hello( world)+",
    r"  two spaces",
    r"(?i)hello",
    r"^hello$",
    r"a/b\\c\"d\n",
    r".{3,5}",
    r"[^a-z]{2}x",
    r"([a-zé_]+\s){2}end",
    "안녕|世界|😀+",
    r"x*y?z{2,}",
]
ARITHMETIC = r"""
start: sum
sum: product | sum "+" product | sum "-" product
product: atom | product "*" atom
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_matches_the_whole_text(regex: str, kind: str, compiler: Compilers) -> None:
    """By Python's `re.fullmatch`. A vocabulary that cannot write it is refused, or ends in a dead end, never in another text."""
    try:
        walks = [walk(compiler, kind, seed=seed, regex=regex) for seed in range(4)]
    except RequestError:
        assert kind in ("unigram", "wordpiece") or (kind, regex[:2]) == ("sentencepiece", "  ")  # it drops the first
        return
    for made in walks:
        assert made.ended or kind in ("unigram", "wordpiece") or len(made.ids) == 400
        if made.ended:
            assert re.fullmatch(regex, made.text), made.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_one_of_them(kind: str, compiler: Compilers) -> None:
    """Word for word, leading spaces, quotes and line breaks too; over some seeds more than one comes."""
    choices = (" the world", "the quick fox", "quick", 'it"s', "two\nlines")
    made = [walk(compiler, kind, seed=seed, choice=choices) for seed in range(24)]
    assert {one.text for one in made if one.ended} <= set(choices)
    assert len({one.text for one in made if one.ended}) > 1


def test_thousands_of_choices_are_one_automaton(compiler: Compilers) -> None:
    """As rules of a grammar, more than 2,000 would be refused."""
    choices = tuple(f"choice {number * 7919}" for number in range(5000))
    assert walk(compiler, "byte_level", choice=choices).text in choices


@pytest.mark.parametrize("kind", KINDS)
def test_lark_parsed_again(kind: str, compiler: Compilers) -> None:
    """Arithmetic, by Python's own parser: only the operators of the grammar, and numbers without a leading zero."""
    ended = 0
    for seed in range(6):
        made = walk(compiler, kind, seed=seed, grammar=ARITHMETIC)
        if made.ended:
            ended += 1
            nodes = list(ast.walk(ast.parse(made.text.strip(), mode="eval")))
            known = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Constant)
            assert all(isinstance(node, known) for node in nodes)
            assert re.fullmatch(r"[0-9()+*-]+", made.text)
    assert ended or kind == "wordpiece"  # which writes spaces between


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"[^\s\S]"}, "no token of this model's vocabulary"),
        ({"regex": "()"}, "only an empty output"),
        ({"regex": "a\ud800"}, "half a surrogate pair, U+D800, at character 1"),
        ({"choice": ("fine", "\udc00")}, "half a surrogate pair"),
        ({"grammar": "start: foo"}, 'at 1(8): unknown name: "foo"'),
        ({"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "leave that line out"),
        ({"grammar": "start: <s> /a/"}, "<s>"),
    ],
)
def test_what_cannot_be_compiled(wanted: dict[str, Any], words: str, compiler: Compilers) -> None:
    """Refused with a reason and the field; places are those in the user's text."""
    with pytest.raises(RequestError) as error:
        compiler("byte_level").compile(StructuredOutputsParams(**wanted))
    assert words in str(error.value) and error.value.field == "structured_outputs"


def test_a_tokenizer_whose_tokens_read_differently_by_neighbour(compiler: Compilers) -> None:
    """`</w>` is a space unless the text ends there: no table of bytes, so no grammar."""
    with pytest.raises(RequestError, match="differently before another one"):
        compiler("word_suffix").compile(StructuredOutputsParams(json_object=True))


def test_a_matcher_goes_its_own_way(compiler: Compilers) -> None:
    """Of one grammar, and copied in the middle; a refused token is an error that stays."""
    grammar = compiler("bytes").compile(StructuredOutputsParams(regex="ab*c|ad"))
    a, b, c, d = (tokenizer("bytes").encode(letter)[0] for letter in "abcd")
    one, two = grammar.matcher(), grammar.matcher()
    assert not one.accept([a, b])
    fork = one.copy()
    assert one.accept([b, c]) and one.can_end and not fork.can_end
    assert allowed(fork) == sorted([b, c]) and allowed(two) == [a]
    assert two.accept([a, d]) and not allowed(two)
    with pytest.raises(GrammarError, match="satisfy the grammar"):
        fork.accept([d])
    assert fork.error and not allowed(fork) and not fork.can_end
    assert fork.copy().error


def test_masks_of_many_rows_are_those_of_each(compiler: Compilers) -> None:
    """Worked out together, in several threads, at the start and in the middle: the same bits as alone."""
    letters = [tokenizer("sentencepiece").encode(letter, add_special_tokens=False)[-1] for letter in "abc"]
    grammars = [compiler("sentencepiece").compile(StructuredOutputsParams(regex=f"[a-c]{{{n}}}( world)*|{n}")) for n in range(1, 9)]
    matchers = [grammar.matcher() for grammar in grammars]
    for matcher in matchers[4:]:
        matcher.accept(letters[:1])
    together = next_tokens(matchers)
    assert together.shape == (8, -(-(tokenizer("sentencepiece").vocab_size + PADDING) // 32))
    for row, matcher in zip(together, matchers, strict=True):
        (alone,) = next_tokens([matcher])
        assert (row == alone).all() and row.any()


def test_special_tokens_and_padding_are_never_allowed(compiler: Compilers) -> None:
    """They leave no trace in the text, so that no grammar can mean them, whatever it says."""
    backend = tokenizer("byte_level")
    matcher = compiler("byte_level").compile(StructuredOutputsParams(grammar="start: <[*]> /x/")).matcher()
    ids = set(allowed(matcher))
    assert ids and not ids & {0, 1, 2, 3, 4} and max(ids) < backend.vocab_size


def test_grammars_are_kept_and_the_oldest_go(compiler: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parameters compile once; what was used last stays."""
    made = compiler("bytes")
    monkeypatch.setattr(compiler_module, "MAX_GRAMMARS", 2)
    first, second, third = (StructuredOutputsParams(regex=text) for text in ("one", "two", "three"))
    grammars = [made.compile(first), made.compile(second)]
    assert made.compile(first) is grammars[0]
    made.compile(third)
    assert made.compile(first) is grammars[0] and made.compile(second) is not grammars[1]

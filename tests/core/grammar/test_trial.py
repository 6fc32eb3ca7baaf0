"""Grammars that mean harm: each is refused or compiled in bounded time and memory, and this process lives on."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.core.grammar.compiler import GrammarCompiler
from octavo.core.grammar.trial import Trial
from octavo.core.structured_outputs import StructuredOutputsParams
from tests.core.grammar.conftest import tokenizer


@pytest.fixture(scope="module")
def strict() -> Iterator[GrammarCompiler]:
    """One that grants a second."""
    made = GrammarCompiler(tokenizer("byte_level"), vocab_size=tokenizer("byte_level").vocab_size, cpu_seconds=1)
    yield made
    made.close()


def chain(length: int) -> str:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return json.dumps({"$defs": links | {f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "true" + "}" * depth


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nesting": ({"json": nested(5000)}, "recursion"),
    "brackets": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
    "groups": ({"regex": "(" * 5000 + "a" + ")" * 5000}, "exceed"),
    "chain of references": ({"json": chain(15000)}, "too long a chain"),
    "chain of rules": (
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(30000)) + '\nr30000: "a"'},
        "too long a chain",
    ),
    "an intersection": (
        {"grammar": "start: A\nA: " + " & ".join(f"/(.{{{n}}})*/" for n in (97, 89, 83, 79, 73, 71, 67))},
        "longer than 1 s",
    ),
    "many properties": ({"json": json.dumps({"properties": {f"p{i}": {} for i in range(40000)}})}, ""),
    "alternatives times alternatives": (
        {"json": json.dumps({"allOf": [{"oneOf": [{"properties": {f"x{i}": {"const": c}}} for c in (1, 2)]} for i in range(22)]})},
        "too large",
    ),
    "doubling": (
        {"grammar": "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"'},
        "",  # by its size or by its time, whichever comes first
    ),
}
BOUNDED: dict[str, dict[str, Any]] = {
    "repetition": {"regex": "a{1,100000}"},
    "repeated repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "exponential automaton": {"regex": "(a|b)*a" + "(a|b)" * 400},
    "many items": {"json": '{"type": "array", "items": {"type": "integer"}, "minItems": 100000, "maxItems": 200000}'},
    "long text": {"json": '{"type": "string", "minLength": 100000, "maxLength": 1000000}'},
    "nested repetition": {"grammar": 'start: (("a" | b){1,100000}){1,100000}\nb: "b" start?'},
    "ambiguity": {"grammar": 'start: s+\ns: s s s | a? a? a? a? b\na: "x" | ""\nb: "y" | ""'},
    "shared references": {
        "json": json.dumps(
            {
                "$defs": {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(40)}
                | {"d40": {"type": "null"}},
                "$ref": "#/$defs/d0",
            }
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_hang_crash_or_swell_is_refused(name: str, strict: GrammarCompiler) -> None:
    """With a reason; the helper goes on with the next one."""
    wanted, words = REFUSED[name]
    with pytest.raises(RequestError) as error:
        strict.compile(StructuredOutputsParams(**wanted))
    assert words in str(error.value) and len(str(error.value)) < 1000
    assert strict.compile(StructuredOutputsParams(regex=f"after {name}"))


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_large_on_paper_alone_is_compiled(name: str, strict: GrammarCompiler) -> None:
    """And its first hundred steps take no memory worth naming."""
    from tests.core.grammar.conftest import Walk

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Walk(strict.compile(StructuredOutputsParams(**BOUNDED[name])).matcher(), tokenizer("byte_level"), seed=1, longest=100)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_a_helper_that_died_is_replaced(strict: GrammarCompiler) -> None:
    """Somebody may kill it; nobody notices."""
    strict.compile(StructuredOutputsParams(regex="before it dies"))
    assert strict._trial is not None
    strict._trial._process.kill()
    strict._trial._process.wait()
    assert strict.compile(StructuredOutputsParams(regex="after it died"))


def test_an_interrupted_trial_leaves_no_verdict_behind(strict: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a verdict may be torn away (Ctrl-C): the next grammar gets its own, not the one that was still to come."""

    def torn_away(self: Trial, seconds: float) -> object:
        raise KeyboardInterrupt

    for first in (False, True):  # the helper serves already, or just starts
        if first:
            strict.close()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Trial, "_receive", torn_away)
            strict.compile(StructuredOutputsParams(regex=f"never{first}"))
        with pytest.raises(RequestError, match="unclosed group"):
            strict.compile(StructuredOutputsParams(regex=f"((({first}"))
        strict.compile(StructuredOutputsParams(choice=("yes", f"no{first}")))


def test_closing_ends_the_helper(compiler: Callable[[str], GrammarCompiler]) -> None:
    """And the next grammar starts another."""
    made = GrammarCompiler(tokenizer("bytes"), vocab_size=256)
    made.compile(StructuredOutputsParams(regex="a"))
    trial = made._trial
    assert trial is not None and trial._process.poll() is None
    made.close()
    assert trial._process.poll() is not None
    made.compile(StructuredOutputsParams(regex="b"))
    made.close()

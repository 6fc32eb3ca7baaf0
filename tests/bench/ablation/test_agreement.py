"""Same tokens or not: first differences, ties, conversations, and the rule for 16 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from octavo.bench.ablation.agreement import Agreement, Lossy, Outputs, Rounding, compare
from octavo.bench.ablation.forcing import Scores
from octavo.bench.records import RequestRecord
from octavo.bench.work import Item, Work

WORK = Work(name="w", items=[Item(prompt=(1, 2), output_len=3), Item(prompt=(3,), output_len=3), Item(prompt=(4,), output_len=3, after=0)])


def record(index: int, *tokens: int, reason: str = "length") -> RequestRecord:
    return RequestRecord(
        index=index, num_prompt_tokens=1, max_tokens=3, due=0.0, sent=0.0, ended=1.0, finish_reason=reason, token_ids=list(tokens)
    )


class Asked:
    """A reference that answers every question alike and remembers it."""

    def __init__(self, distance: float) -> None:
        self.distance = distance
        self.questions: list[tuple[list[int], int]] = []

    def __call__(self, context: Sequence[int], token: int) -> float:
        self.questions.append((list(context), token))
        return self.distance


SAME = [record(0, 5, 6, 7), record(1, 5, 6, 7), record(2, 5, 6, 7)]


def test_equal_answers_ask_nothing() -> None:
    """The reference is needed for differences only."""
    asked = Asked(0.0)
    found = compare(WORK, SAME, SAME, distance=asked)
    assert (found, asked.questions) == (Agreement(compared=3, equal=3), [])
    assert found.holds and str(found) == "3/3 the same"


@pytest.mark.parametrize(("distance", "holds"), [(0.9e-4, True), (1.1e-4, False)])
def test_a_first_difference(distance: float, holds: bool) -> None:
    """Both tokens are judged after the tokens before them; under 1e-4 it is a tie. The turn that goes on from it is not compared."""
    asked = Asked(distance)
    found = compare(WORK, SAME, [record(0, 5, 9, 9), *SAME[1:]], distance=asked)
    assert asked.questions == [([1, 2, 5], 6), ([1, 2, 5], 9)]
    assert (found.compared, found.equal, found.left_out, found.holds) == (2, 1, 1, holds)
    assert str(found) == ("2/2 the same, 1 tied, 1 not compared" if holds else "1/2 the same, 1 not compared")
    kind = "tie" if holds else "DIFFERENT"
    assert [str(one) for one in found.divergences] == [f"{kind}: seed 0, item 0, token 1: 9 instead of 6, logits {distance:.2g} apart"]


def test_a_later_turn_is_judged_after_the_whole_conversation() -> None:
    """Its context is the first turn with its answer, and its own new tokens."""
    asked = Asked(0.0)
    compare(WORK, SAME, [*SAME[:2], record(2, 8, 6, 7)], distance=asked)
    assert asked.questions[0] == ([1, 2, 5, 6, 7, 4], 5)


def test_a_shorter_answer_is_never_a_tie() -> None:
    """No rounding explains that one ends before the other."""
    found = compare(WORK, SAME, [record(0, 5, 6), *SAME[1:]], distance=Asked(0.0))
    assert not found.holds and found.divergences[0].distance == math.inf


def test_answers_that_are_missing() -> None:
    """What failed on one side alone makes the comparison incomplete, with its number; nothing differs. What both failed is left out."""
    failed = [record(0, reason="error"), *SAME[1:]]
    words = {"failed here and not by the parent": (SAME, failed), "failed by the parent and not here": (failed, SAME)}
    for said, sides in words.items():
        found = compare(WORK, *sides, distance=Asked(0.0))
        assert (found.compared, found.left_out, found.agrees, found.holds) == (1, 2, True, False)  # the turn after it is left out too
        assert str(found) == f"1/1 the same, 2 not compared, INCOMPLETE: 1 request {said}"
        assert not found.joined(Agreement(compared=5, equal=5)).holds
    both = compare(WORK, failed, failed, distance=Asked(0.0))
    assert (both.compared, both.left_out, both.holds) == (1, 2, True)
    none = compare(WORK, SAME, [], distance=Asked(0.0))
    assert (none.agrees, none.holds) == (True, False)
    assert str(none) == "nothing to compare, INCOMPLETE: 3 requests failed here and not by the parent"
    nothing = compare(WORK, [], [], distance=Asked(0.0))
    assert (nothing.agrees, nothing.holds, str(nothing)) == (False, False, "nothing to compare")


def test_lost_answers_in_sixteen_bits() -> None:
    """As in fp32; also where none is left to be scored."""
    lossy = Lossy(rounding=rounding(20), naive=rounding(20), same_answers=1, answers=1, perplexity=3.0, parent_perplexity=3.0, lost=2)
    assert (lossy.agrees, lossy.holds, lossy.joined(lossy).lost) == (True, False, 4)
    assert "INCOMPLETE: 2 requests failed here and not by the parent" in Outputs(exact=None, lossy=lossy).lines[2]
    assert replace(lossy, rounding=rounding(0, tokens=0)).agrees and not replace(lossy, rounding=rounding(0, tokens=0), lost=0).agrees


def rounding(off: int, farthest: float = 0.1, tokens: int = 1000) -> Rounding:
    return Rounding(tokens=tokens, off=off, farthest=farthest)


def test_the_rate_of_other_tokens() -> None:
    """Of scored answers: what is not the reference's first choice."""
    found = Rounding.of([Scores([0.0, 0.25, 0.0], [-1.0, -2.0, -1.0]), Scores([0.0], [-1.0])])
    assert (found, found.rate) == (Rounding(tokens=4, off=1, farthest=0.25), 0.25)


@pytest.mark.parametrize(
    ("cell", "naive", "expected"),
    [
        (rounding(20), rounding(20), True),
        (rounding(30), rounding(20), True),  # within chance
        (rounding(40), rounding(20), False),
        (rounding(20, farthest=0.2), rounding(20), True),
        (rounding(20, farthest=0.21), rounding(20), False),
        (rounding(0, farthest=0.0), rounding(0, farthest=0.0), True),
        (rounding(0, tokens=0), rounding(0), False),
    ],
)
def test_the_rule_for_sixteen_bits(cell: Rounding, naive: Rounding, expected: bool) -> None:
    """No worse than the naive kernel's own, in rate and in distance."""
    lossy = Lossy(rounding=cell, naive=naive, same_answers=1, answers=2, perplexity=3.0, parent_perplexity=3.0)
    assert lossy.holds is expected
    exact = Agreement(compared=1, equal=1)
    assert Outputs(exact=exact, lossy=lossy).hold is expected
    assert Outputs(exact=None, lossy=lossy).hold is expected
    assert Outputs(exact=Agreement(compared=0, equal=0), lossy=lossy).hold is False
    assert Outputs(exact=None).hold is False


def test_what_is_allowed_is_what_is_judged_by() -> None:
    """A rate or a distance at the limit that is printed is within it, and a bit more is not."""
    naive = rounding(30, farthest=0.1)
    assert rounding(1).allowed_distance(naive) == 0.2
    off = next(off for off in range(30, 100) if not rounding(off).within(naive))
    assert rounding(off - 1).rate <= rounding(off - 1).allowed_rate(naive) and rounding(off).rate > rounding(off).allowed_rate(naive)
    pooled = (30 + off) / 2000
    assert rounding(off).allowed_rate(naive) == pytest.approx(0.03 + 2 * math.sqrt(pooled * (1 - pooled) * 2 / 1000))


def test_what_is_printed() -> None:
    """The result of both checks, and agreement and perplexity."""
    lossy = Lossy(rounding=rounding(20), naive=rounding(30), same_answers=1, answers=2, perplexity=3.25, parent_perplexity=3.5)
    assert Outputs(exact=Agreement(compared=2, equal=2), lossy=lossy).lines == [
        "fp32: 2/2 the same",
        "16 bits: 98.00 % of 1000 tokens are the fp32 reference's, the farthest is 0.1 off",
        "  allowed: 4.40 % other tokens, none farther off than 0.2, since of the naive kernel's own 97.00 % of 1000 tokens are the fp32 "
        "reference's, the farthest is 0.1 off; up to 2 standard errors more often, and 2 times as far",
        "  1 of 2 answers equal the parent's; perplexity of the parent's answers 3.2500, by the parent itself 3.5000",
    ]
    said = Outputs(exact=None, lossy=replace(lossy, what="int8 weights")).lines[0]
    assert said == "int8 weights: 98.00 % of 1000 tokens are the fp32 reference's, the farthest is 0.1 off"

"""Do two stacks give the same tokens? Equal ones in fp32; in 16 bits, or quantised anew, no farther off than rounding alone explains.

A first difference in fp32 is accepted where the reference has both tokens within `TIE` of the largest logit: which one is larger is then
a matter of the order of additions. It is counted, and shown. What comes after it is another text, and not compared.
Must not know: engines, how tokens were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

from octavo.bench.ablation.forcing import Scores
from octavo.bench.records import RequestRecord
from octavo.bench.work import Work, prompt_of

TIE = 1e-4  # distance of logits
MARGIN = 2.0  # standard errors by which a rate may be above the one it must not exceed
FARTHEST = 2.0  # times the naive kernel's own farthest token

Distance = Callable[[Sequence[int], int], float]
"""(tokens so far, next token) -> by how much the next one's logit is below the largest in the fp32 reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where an answer first differs from the parent's."""

    index: int  # of the item in the work
    seed: int  # of the work
    position: int  # in the answer
    expected: int
    got: int
    distance: float  # by how much the lower of the two tokens' logits is below the largest, in the fp32 reference

    @property
    def is_tie(self) -> bool:
        """Nothing but the order of additions."""
        return self.distance < TIE

    def __str__(self) -> str:
        kind = "tie" if self.is_tie else "DIFFERENT"
        where = f"seed {self.seed}, item {self.index}, token {self.position}"
        return f"{kind}: {where}: {self.got} instead of {self.expected}, logits {self.distance:.2g} apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of a cell with its parent, in fp32."""

    compared: int  # answers
    equal: int
    divergences: tuple[Divergence, ...] = ()
    left_out: int = 0  # answers of which one side has none, or that go on from an answer that differs
    lost: int = 0  # of these, answered by the parent, and not here
    parent_lost: int = 0  # and the other way round

    @property
    def ties(self) -> int:
        """Answers that differ by a tie only."""
        return sum(one.is_tie for one in self.divergences)

    @property
    def missing(self) -> str:
        """What keeps it from being complete: an answer that one side alone has is neither the same nor another. Empty if nothing."""
        return missing(self.lost, self.parent_lost)

    @property
    def agrees(self) -> bool:
        """Of the answers that could be compared none differs but by a tie. False where nobody answered."""
        return self.ties == len(self.divergences) and (self.compared > 0 or bool(self.missing))

    @property
    def holds(self) -> bool:
        """It agrees, and it is complete."""
        return self.agrees and not self.missing

    def joined(self, other: Agreement) -> Agreement:
        """Of both, two repeats for example."""
        return Agreement(
            compared=self.compared + other.compared,
            equal=self.equal + other.equal,
            divergences=self.divergences + other.divergences,
            left_out=self.left_out + other.left_out,
            lost=self.lost + other.lost,
            parent_lost=self.parent_lost + other.parent_lost,
        )

    def __str__(self) -> str:
        incomplete = f", INCOMPLETE: {self.missing}" if self.missing else ""
        if not self.compared:
            return f"nothing to compare{incomplete}"
        ties = f", {self.ties} tied" if self.ties else ""
        left_out = f", {self.left_out} not compared" if self.left_out else ""
        return f"{self.equal + self.ties}/{self.compared} the same{ties}{left_out}{incomplete}"


def missing(lost: int, parent_lost: int) -> str:
    """In words: answers that one side alone has."""
    words = [(lost, "failed here and not by the parent"), (parent_lost, "failed by the parent and not here")]
    return ", ".join(f"{count} request{'s' * (count > 1)} {which}" for count, which in words if count)


def compare(work: Work, parent: Sequence[RequestRecord], cell: Sequence[RequestRecord], *, distance: Distance) -> Agreement:
    """Token by token, answers of the same work. `distance` is asked at first differences only."""
    answers, expected = _answers(cell), _answers(parent)
    off: set[int] = set()  # items whose answer is not the parent's
    divergences = []
    compared = 0
    for index, item in enumerate(work.items):
        wanted, got = expected.get(index), answers.get(index)
        if wanted is None or got is None or item.after in off:
            off.add(index)
            continue
        compared += 1
        if wanted == got:
            continue
        off.add(index)
        position = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
        if position < min(len(wanted), len(got)):
            before = [*prompt_of(work, index, expected), *wanted[:position]]
            apart = max(distance(before, token) for token in (wanted[position], got[position]))
            tokens = wanted[position], got[position]
        else:  # one ends before the other, which no rounding explains
            apart, tokens = math.inf, (-1, -1)
        divergences.append(Divergence(index=index, seed=work.seed, position=position, expected=tokens[0], got=tokens[1], distance=apart))
    return Agreement(
        compared=compared,
        equal=compared - len(divergences),
        divergences=tuple(divergences),
        left_out=len(work.items) - compared,
        lost=len(expected.keys() - answers.keys()),
        parent_lost=len(answers.keys() - expected.keys()),
    )


def _answers(records: Sequence[RequestRecord]) -> dict[int, list[int]]:
    return {record.index: record.token_ids for record in records if record.succeeded}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How far the tokens of a lossy run are from what the fp32 reference would have chosen in their places."""

    tokens: int
    off: int  # tokens that are not the reference's first choice
    farthest: float  # the largest distance of a token's logit from the largest

    @classmethod
    def of(cls, scores: Sequence[Scores]) -> Rounding:
        """Of answers scored by the reference."""
        distances = [value for one in scores for value in one.distances]
        return cls(tokens=len(distances), off=sum(value > 0 for value in distances), farthest=max(distances, default=0.0))

    @property
    def rate(self) -> float:
        """Share of tokens that are not the reference's first choice."""
        return self.off / self.tokens if self.tokens else 0.0

    def joined(self, other: Rounding) -> Rounding:
        """Of the tokens of both."""
        return Rounding(tokens=self.tokens + other.tokens, off=self.off + other.off, farthest=max(self.farthest, other.farthest))

    def within(self, naive: Rounding) -> bool:
        """No worse than the naive kernel's own: in rate up to chance, and in distance up to a factor."""
        if not self.tokens or not naive.tokens:
            return False
        return self.rate <= self.allowed_rate(naive) and self.farthest <= self.allowed_distance(naive)

    def allowed_rate(self, naive: Rounding) -> float:
        """The naive kernel's own, and as much as chance may add in so many tokens of both. Each has some."""
        rate = (self.off + naive.off) / (self.tokens + naive.tokens)
        return naive.rate + MARGIN * math.sqrt(rate * (1 - rate) * (1 / self.tokens + 1 / naive.tokens))

    def allowed_distance(self, naive: Rounding) -> float:
        """From the largest logit."""
        return FARTHEST * naive.farthest

    def __str__(self) -> str:
        return f"{100 * (1 - self.rate):.2f} % of {self.tokens} tokens are the fp32 reference's, the farthest is {self.farthest:.3g} off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossy:
    """Beside the speed of a cell that does not compute what its parent computes, or that rounds to 16 bits."""

    rounding: Rounding
    naive: Rounding  # the naive kernel's with ops `torch`, alone and batched, whichever is farther from the reference
    same_answers: int  # answers that equal the parent's whole answer
    answers: int
    perplexity: float  # of the parent's answers in the first repeat, by this cell
    parent_perplexity: float
    left_out: int = 0  # answers that are missing since their requests failed
    lost: int = 0  # of these, answered by the parent
    parent_lost: int = 0  # answers of which the parent's are missing
    what: str = "16 bits"  # for which its tokens may be others

    def joined(self, later: Lossy) -> Lossy:
        """With a later repeat, in which no perplexity is computed."""
        return replace(
            self,
            rounding=self.rounding.joined(later.rounding),
            naive=self.naive.joined(later.naive),
            same_answers=self.same_answers + later.same_answers,
            answers=self.answers + later.answers,
            left_out=self.left_out + later.left_out,
            lost=self.lost + later.lost,
            parent_lost=self.parent_lost + later.parent_lost,
        )

    @property
    def missing(self) -> str:
        """As of an Agreement."""
        return missing(self.lost, self.parent_lost)

    @property
    def agrees(self) -> bool:
        """As near to the fp32 reference as the naive kernel in the same type. Where all answers are lost, nothing differs."""
        return self.rounding.within(self.naive) or bool(self.lost and not self.rounding.tokens)

    @property
    def holds(self) -> bool:
        """It agrees, and each side has the answers that the other has."""
        return self.agrees and not self.missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What is known of a cell's tokens in one scenario. Only where `hold` is a speed to be printed."""

    exact: Agreement | None  # in fp32; None: it cannot run in fp32, or quantises otherwise than its parent
    lossy: Lossy | None = None

    @property
    def _parts(self) -> list[Agreement | Lossy]:
        return [part for part in (self.exact, self.lossy) if part is not None]

    @property
    def hold(self) -> bool:
        """Both that apply do, and one does."""
        return bool(self._parts) and all(part.holds for part in self._parts)

    @property
    def agree(self) -> bool:
        """No token differs of those that could be compared; answers may be missing."""
        return bool(self._parts) and all(part.agrees for part in self._parts)

    @property
    def missing(self) -> str:
        """What keeps the comparison from being complete; empty if nothing."""
        return next((part.missing for part in self._parts if part.missing), "")

    def joined(self, later: Outputs) -> Outputs:
        """With what a later repeat showed."""
        return Outputs(exact=_joined(self.exact, later.exact), lossy=_joined(self.lossy, later.lossy))

    @property
    def lines(self) -> list[str]:
        """What to print: the result, then each answer that differs."""
        lines = []
        if self.exact is not None:
            lines += [f"fp32: {self.exact}", *(f"  {one}" for one in self.exact.divergences)]
        if self.lossy is not None:
            lossy = self.lossy
            lines.append(f"{lossy.what}: {lossy.rounding}")
            if lossy.rounding.tokens and lossy.naive.tokens:
                rate, distance = lossy.rounding.allowed_rate(lossy.naive), lossy.rounding.allowed_distance(lossy.naive)
                lines.append(
                    f"  allowed: {100 * rate:.2f} % other tokens, none farther off than {distance:.3g}, since of the naive kernel's own "
                    f"{lossy.naive}; up to {MARGIN:g} standard errors more often, and {FARTHEST:g} times as far"
                )
            left_out = f", {lossy.left_out} not compared" if lossy.left_out else ""
            left_out += f", INCOMPLETE: {lossy.missing}" if lossy.missing else ""
            lines.append(
                f"  {lossy.same_answers} of {lossy.answers} answers equal the parent's{left_out}; "
                f"perplexity of the parent's answers {lossy.perplexity:.4f}, by the parent itself {lossy.parent_perplexity:.4f}"
            )
        return lines


class _Joinable(Protocol):
    def joined(self, other: Self, /) -> Self: ...


_Part = TypeVar("_Part", bound=_Joinable)


def _joined(one: _Part | None, other: _Part | None) -> _Part | None:
    """Of both; where one is missing, the other."""
    return one.joined(other) if one is not None and other is not None else one if other is None else other

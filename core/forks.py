"""What happens among the sequences of one request: n samples part, beams advance, a preempted family comes back.

The prompt runs once. From its one row of logits n tokens are sampled, or the best `beam_width` continuations are taken, and the
other sequences fork from the first: they share its KV until they write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.kv import Allocator
from octavo.core.request import Request, Sequence, Status

Candidate = tuple[int, float]
"""A token id and its log probability."""


def fork(kv: Allocator, parent: Sequence, child: Sequence, num_tokens: int) -> None:
    """Give `child` the first `num_tokens` computed positions of `parent`."""
    kv.fork(parent, child, num_tokens)
    child.status = Status.OPEN
    child.num_computed = child.num_scheduled = num_tokens


def unborn(request: Request) -> list[Sequence]:
    """The sequences that have not parted from a request's first one yet."""
    return [] if request.forked else [Sequence(f"{request.id}/{i}", request, i) for i in range(1, request.width)]


def split(kv: Allocator, lead: Sequence) -> list[Sequence]:
    """The prompt of a request with n > 1 is computed: its n sequences, the lead first, the others forked from it."""
    request = lead.request
    children = unborn(request)
    for child in children:
        fork(kv, lead, child, lead.num_computed)
    request.sequences += children
    request.forked = True
    return [lead, *children]


def common_prefix(sequences: list[Sequence]) -> int:
    """Positions that all these can share when computed again: their last tokens differ or are still to be run."""
    shortest = min(sequence.num_tokens for sequence in sequences) - 1
    rows = [sequence.tokens(0, shortest) for sequence in sequences]
    return next((i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1), shortest)


def rejoin(kv: Allocator, request: Request) -> None:
    """After a preemption the first sequence has computed the common prefix again: the others fork from it.

    Recomputed one by one they might not fit where they fitted shared. The lead itself may be further (a prefix cache hit).
    """
    lead, *others = request.sequences
    for sequence in others:
        fork(kv, lead, sequence, request.restore or 0)
    request.restore = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that beam search considers: the parent's output, one more token, the sum of log probabilities."""

    output: list[int]
    score: float
    parent: Sequence


def pick_beams(request: Request, rows: list[tuple[Sequence, list[Candidate]]]) -> tuple[list[Hypothesis], list[Hypothesis]]:
    """The best continuations of all beams: live ones (at most `beam_width`), and those that ended before them.

    Independent of the order of `rows`: ties are broken by the tokens.
    """
    candidates = sorted(
        (Hypothesis([*beam.output, token], beam.score + logprob, beam) for beam, row in rows for token, logprob in row),
        key=lambda h: (-h.score, h.output),
    )
    live: list[Hypothesis] = []
    ended: list[Hypothesis] = []
    for hypothesis in candidates:
        if len(live) == request.beam_width:
            break
        (ended if hypothesis.output[-1] in request.stop_ids else live).append(hypothesis)
    return live, ended


def advance_beams(
    kv: Allocator, request: Request, rows: list[tuple[Sequence, list[Candidate]]], *, drop: Callable[[Sequence], None]
) -> bool:
    """One step of beam search; True when the search is over. Results go to `request.finished`.

    Dropped beams are closed before new ones fork, so that a search never needs more room than its width.
    """
    request.forked = True
    live, ended = pick_beams(request, rows)
    request.finished += [_result(h, "stop") for h in ended]
    if len(request.finished) >= request.beam_width:
        return True
    if not live or len(live[0].output) >= request.max_tokens:
        request.finished += [_result(h, "length") for h in live]
        return True
    heirs: dict[Sequence, list[Hypothesis]] = {}
    for hypothesis in live:
        heirs.setdefault(hypothesis.parent, []).append(hypothesis)
    for beam, _ in rows:
        if beam not in heirs:
            drop(beam)
    for parent, (first, *rest) in heirs.items():
        for number, hypothesis in enumerate(rest):
            child = Sequence(f"{parent.id}+{len(hypothesis.output)}.{number}", request, output=hypothesis.output, score=hypothesis.score)
            request.sequences.append(child)
            fork(kv, parent, child, parent.num_computed)
        parent.output, parent.score = first.output, first.score
    return False


def _result(hypothesis: Hypothesis, reason: str) -> Sequence:
    return Sequence(
        hypothesis.parent.id,
        hypothesis.parent.request,
        output=hypothesis.output,
        score=hypothesis.score,
        status=Status.DONE,
        finish_reason=reason,
    )

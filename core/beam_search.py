"""Beam search over the sequences of one request, by the rules of transformers' `_beam_search` (5.24), result for result.

Each step takes the best continuations of all beams by summed log probability. Those that end count only if they are among the first
`beam_width`; the best `beam_width` others go on. Of what has ended, the best `beam_width` by `BeamSearchParams.score` are kept.
Must not know: logits, plans, schedulers, how KV is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import PluginContractError
from octavo.core.forks import fork
from octavo.core.kv import Allocator
from octavo.core.request import Request, Sequence, Status

Candidate = tuple[int, float]
"""A token id and its log probability."""

Rows = list[tuple[Sequence, list[Candidate]]]
"""The beams that sampled in a step, each with its likeliest tokens: `Request.num_candidates` of them at least, in any order."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that the search considers: the parent's output, one more token, the sum of log probabilities."""

    output: list[int]
    log_prob: float
    parent: Sequence


def pick_beams(request: Request, rows: Rows) -> tuple[list[Hypothesis], list[Hypothesis]]:
    """The continuations that go on, at most `beam_width`, and those that end here; both from the best.

    Independent of the order of `rows`: ties are broken by the tokens. At `max_tokens` all end.
    """
    width, stop_ids = request.beam_width, request.stop_ids
    ranked = sorted(
        ((beam.score + log_prob, beam.output, token, beam) for beam, row in rows for token, log_prob in row),
        key=lambda candidate: (-candidate[0], candidate[1], candidate[2]),
    )
    last = len(rows[0][0].output) + 1 >= request.max_tokens
    live: list[Hypothesis] = []
    ended: list[Hypothesis] = []
    for rank, (log_prob, output, token, parent) in enumerate(ranked):
        ends = last or token in stop_ids
        if not ends and len(live) < width:
            live.append(Hypothesis([*output, token], log_prob, parent))
        elif ends and rank < width:
            ended.append(Hypothesis([*output, token], log_prob, parent))
        if rank + 1 >= width and (last or len(live) == width):
            break
    return live, ended


def is_over(params: BeamSearchParams, live: list[Hypothesis], finished: list[Sequence], max_tokens: int) -> bool:
    """Whether the search stops here; `live` and `finished` from the best."""
    if not live:
        return True
    if len(finished) < params.beam_width:
        return False
    if params.early_stopping is True or params.beam_width == 1:  # with one beam: greedy search
        return True
    best, worst = live[0], finished[-1]
    length = max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else len(best.output)
    return params.score(best.log_prob, length) <= params.score(worst.score, len(worst.output))


def advance_beams(kv: Allocator, request: Request, rows: Rows, *, drop: Callable[[Sequence], None]) -> bool:
    """One step of the search; True when it is over. What ended is in `request.finished`, from the best.

    Dropped beams are closed before new ones fork, so that a search never needs more room than its width.
    """
    params = request.beams
    if params is None:
        raise PluginContractError(f"request {request.id!r} got candidates for beams but searches none")
    request.forked = True
    live, ended = pick_beams(request, rows)
    finished = sorted([*request.finished, *(_result(hypothesis) for hypothesis in ended)], key=rank_of)
    request.finished = finished[: request.beam_width]
    if is_over(params, live, request.finished, request.max_tokens):
        for sequence in list(request.sequences):
            drop(sequence)
        return True
    heirs: dict[Sequence, list[Hypothesis]] = {}
    for hypothesis in live:
        heirs.setdefault(hypothesis.parent, []).append(hypothesis)
    for beam, _ in rows:
        if beam not in heirs:
            drop(beam)
    for parent, (first, *rest) in heirs.items():
        for number, hypothesis in enumerate(rest):
            child = Sequence(f"{parent.id}+{len(hypothesis.output)}.{number}", request, output=hypothesis.output, score=hypothesis.log_prob)
            request.sequences.append(child)
            fork(kv, parent, child, parent.num_computed)
        parent.output, parent.score = first.output, first.log_prob
    return False


def rank_of(sequence: Sequence) -> tuple[float, list[int]]:
    """Sorts hypotheses of a search from the best; ties by the tokens."""
    params, length = sequence.request.beams, len(sequence.output)
    return -(sequence.score if params is None else params.score(sequence.score, length)), sequence.output


def _result(hypothesis: Hypothesis) -> Sequence:
    request = hypothesis.parent.request
    return Sequence(
        hypothesis.parent.id,
        request,
        output=hypothesis.output,
        score=hypothesis.log_prob,
        status=Status.DONE,
        finish_reason="stop" if hypothesis.output[-1] in request.stop_ids else "length",
    )

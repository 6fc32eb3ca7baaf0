"""A plan's chunks become rows of logits and what is to be drawn from each.

Must not know: torch, logits, how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq

from octavo.core.plan import Chunk
from octavo.core.request import Sequence
from octavo.core.sampling_rows import RowRequest
from octavo.core.token_counts import TokenCounts


def all_argmax(chunks: Seq[Chunk]) -> bool:
    """Whether every token of the step is simply the likeliest, so that logits need not leave the model."""
    for chunk in chunks:
        request = chunk.sequence.request
        params = request.params
        if not request.takes_likeliest:
            return False
        if params.min_tokens and chunk.sampled_from + 1 - chunk.sequence.prompt_len < params.min_tokens:
            return False
    return True


def row_requests(chunks: Seq[Chunk]) -> list[RowRequest]:
    """How to draw from each row of logits, in their order: none of a chunk, one, or with drafts one more than there are drafts."""
    return [row for chunk in chunks for row in _rows(chunk)]


def num_draws(chunk: Chunk) -> int:
    """Tokens drawn from the chunk's rows of logits: one each, or all first tokens of n samples from one row; none of beams."""
    request = chunk.sequence.request
    if not chunk.samples or request.beam_width:
        return 0
    return request.width if request.width > 1 and request.samples_jointly else 1 + len(chunk.drafts)


def chunk_of_row(chunks: Seq[Chunk], row: int) -> int:
    """The index of the chunk whose row of logits this is."""
    for index, chunk in enumerate(chunks):
        row -= chunk.stop - chunk.sampled_from
        if row < 0:
            return index
    raise IndexError(f"{len(chunks)} chunks have {-row} rows too few")


def _rows(chunk: Chunk) -> Iterator[RowRequest]:
    sequence, request = chunk.sequence, chunk.sequence.request
    settings = request.sampling
    positions = range(chunk.sampled_from, chunk.stop)
    for position in positions:
        yield RowRequest(
            settings,
            sequence.sample_index,
            position + 1,
            position + 1 - sequence.prompt_len,
            num_draws(chunk) // len(positions),
            request.num_candidates,
            request.prompt,
            sequence.output,
            _counts(sequence) if settings.penalised else None,
            sequence.grammar,
        )


def _counts(sequence: Sequence) -> TokenCounts:
    if sequence.counts is None:
        sequence.counts = TokenCounts(sequence.request.prompt if sequence.request.sampling.repeats else ())
    return sequence.counts.follow(sequence.output)

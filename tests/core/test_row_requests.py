"""Chunks become rows: how many there are, what is drawn from each, and when a step is plainly greedy."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.plan import Chunk
from octavo.core.request import Request
from octavo.core.row_requests import all_argmax, chunk_of_row, row_requests
from octavo.core.sampling_params import SamplingParams

PROMPT = (5, 6, 7, 6)


def _request(*, stop_ids: frozenset[int] = frozenset(), beam_width: int = 0, **params: Any) -> Request:
    made = SamplingParams(**({"max_tokens": 20, "temperature": 0} | params))
    beams = BeamSearchParams(beam_width=beam_width, max_tokens=20) if beam_width else None
    return Request("r", PROMPT, made, max_tokens=20, seed=3, stop_ids=stop_ids, beams=beams)


def _chunk(request: Request, *, output: int = 0, drafts: tuple[int, ...] = (), samples: bool = True) -> Chunk:
    """What runs the last known token, or a piece of the prompt that samples nothing."""
    (sequence,) = request.sequences
    sequence.output = [10 + token for token in range(output)]
    if not samples:
        return Chunk(sequence, 0, 2, 2, False, (), 0)
    last = sequence.num_tokens - 1
    return Chunk(sequence, last, 1 + len(drafts), last, True, drafts, 0)


@pytest.mark.parametrize(
    ("params", "output", "plain"),
    [
        ({}, 3, True),
        ({"temperature": 1e-6, "top_p": 0.5, "seed": 1}, 3, True),
        ({"min_tokens": 3}, 3, True),
        ({"min_tokens": 4}, 3, False),
        ({"temperature": 0.1}, 3, False),
        ({"logit_bias": {1: 2.0}}, 3, False),
        ({"allowed_token_ids": [1]}, 3, False),
        ({"presence_penalty": 0.1}, 3, False),
        ({"logits_processors": [lambda output, logits: logits]}, 3, False),
        ({"logprobs": 0}, 3, False),
        ({"beam_width": 2}, 0, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_whether_the_argmax_is_enough(params: dict[str, Any], output: int, plain: bool) -> None:
    """Not as soon as one chunk draws at random, changes its logits, shows them, or wants candidates."""
    chunks = [_chunk(_request(), output=2), _chunk(_request(**params), output=output)]
    assert all_argmax(chunks) == plain


def test_rows_of_chunks() -> None:
    """None of a piece of a prompt, one of a decode, n draws from the one row of n samples, no draw from a beam's, one for each draft."""
    chunks = [
        _chunk(_request(), samples=False),
        _chunk(_request(min_tokens=1), output=3),
        _chunk(_request(n=5, temperature=1.0)),
        _chunk(_request(beam_width=4, stop_ids=frozenset({1, 2}))),
        _chunk(_request(), output=1, drafts=(8, 9)),
    ]
    rows = row_requests(chunks)
    assert [(row.position, row.num_output, row.draws, row.candidates) for row in rows] == [
        (7, 3, 1, 0),
        (4, 0, 5, 0),
        (4, 0, 0, 6),
        (5, 1, 1, 0),
        (6, 2, 1, 0),
        (7, 3, 1, 0),
    ]
    assert [chunk_of_row(chunks, row) for row in range(6)] == [1, 2, 3, 4, 4, 4]
    with pytest.raises(IndexError):
        chunk_of_row(chunks, 6)


def test_counts_are_kept_with_the_sequence() -> None:
    """From step to step, of the output and, for the repetition penalty, with the prompt's ids; none where nobody asks."""
    plain, frequent, repeated = _request(), _request(frequency_penalty=1.0), _request(repetition_penalty=1.1)
    for output in (2, 3):
        rows = row_requests([_chunk(request, output=output) for request in (plain, frequent, repeated)])
        assert rows[0].counts is None
        assert [row.counts.ids.tolist() for row in rows[1:] if row.counts] == [[10, 11, 12][:output], [5, 6, 7, 10, 11, 12][: 3 + output]]
    assert frequent.sequences[0].counts is rows[1].counts is not None

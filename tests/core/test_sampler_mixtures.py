"""Any mixture of settings, against a slow reference; and a row's tokens whatever its neighbours, order, and the way they are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from octavo.core import sampling_contenders
from octavo.core.grammar.masks import Masks
from octavo.core.logits_processing import forbid
from octavo.core.sampler import NOTHING_LEFT, Sampler
from octavo.core.sampling_contenders import FIRST_GUESS
from octavo.core.sampling_rows import RowRequest, SamplingRows
from octavo.core.scoring import score_rows
from tests.core.sampling_reference import make_row, may_be_drawn, processed

VOCAB = 150  # more than one block

tokens = st.integers(0, VOCAB - 1)
few = st.lists(tokens, max_size=6)


def optional(strategy: st.SearchStrategy[Any], off: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(off), strategy)


rows = st.builds(
    make_row,
    seed=st.integers(-(2**63), 2**63 - 1),
    sample_index=st.integers(0, 3),
    draws=st.integers(1, 3),
    prompt=few,
    output=few,
    temperature=optional(st.floats(1e-3, 30.0), 0.0),
    top_k=optional(st.integers(1, VOCAB + 5), 0),
    top_p=optional(st.floats(1e-6, 1.0), 1.0),
    min_p=optional(st.floats(0.0, 1.0), 0.0),
    repetition_penalty=optional(st.floats(0.3, 3.0), 1.0),
    frequency_penalty=optional(st.floats(-2, 2), 0.0),
    presence_penalty=optional(st.floats(-2, 2), 0.0),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=3),
    allowed_token_ids=optional(st.lists(tokens, min_size=1, max_size=5), []),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=2), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_ids=few,
)


def make_logits(count: int, seed: int, step: float) -> torch.Tensor:
    """Rounded to `step`, so that many are equal."""
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits / step).round() * step if step else logits


def sample(logits: torch.Tensor, requests: Sequence[RowRequest], *, guess: float = FIRST_GUESS) -> list[list[int]]:
    """The tokens of each row."""
    drawn = Sampler(guess=guess).sample(logits.clone(), SamplingRows.build(requests)).token_ids.tolist()
    ends = np.cumsum([row.draws for row in requests])
    return [drawn[end - row.draws : end] for end, row in zip(ends, requests, strict=True)]


@given(st.lists(rows, min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_tokens_are_those_of_the_reference(requests: list[RowRequest], seed: int, step: float) -> None:
    """Each lies where its uniform number falls in the reference's distribution, or nothing is left to draw; sorted rows say the same."""
    logits = make_logits(len(requests), seed, step)
    drawn = sample(logits, requests)
    for row, request, found in zip(logits.numpy(), requests, drawn, strict=True):
        if processed(row, request).max() == -np.inf:
            assert found == [NOTHING_LEFT] * request.draws
        else:
            assert all(may_be_drawn(row, request, token, draw=draw) for draw, token in enumerate(found))
    assert sample(logits, requests, guess=np.inf) == sample(logits, requests, guess=1e6) == drawn


@given(st.lists(rows, min_size=2, max_size=9), st.integers(0, 1000), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_row_is_alone_in_any_company(requests: list[RowRequest], seed: int, rng: Any) -> None:
    """Alone, in any order, among any others: the same tokens (faults 34 and 35)."""
    logits = make_logits(len(requests), seed, 0.25)
    drawn = sample(logits, requests)
    order = list(range(len(requests)))
    rng.shuffle(order)
    assert sample(logits[order], [requests[index] for index in order]) == [drawn[index] for index in order]
    some = order[: len(order) // 2]
    assert sample(logits[some], [requests[index] for index in some]) == [drawn[index] for index in some]
    assert [tokens for index, row in enumerate(requests) for tokens in sample(logits[[index]], [row])] == drawn


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000])
def test_any_size_of_vocabulary(vocab: int) -> None:
    """Smaller than a block, as large, a little larger: every way gives tokens of the vocabulary, and the same ones."""
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab))
    mixture: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.3}, {"temperature": 0}, {"top_k": 2000, "top_p": 0.5}]
    requests = [make_row(seed=index, draws=4, **mixture[index % 6]) for index in range(40)]
    drawn = sample(logits, requests)
    assert drawn == sample(logits, requests, guess=np.inf)
    assert all(0 <= token < vocab for row in drawn for token in row)
    for row, request, found in zip(logits.numpy(), requests, drawn, strict=True):
        assert all(may_be_drawn(row, request, token, draw=draw) for draw, token in enumerate(found))


def test_very_many_contenders_are_taken_in_parts() -> None:
    """Rows as flat as can be: no more at once than sums are exact for, and the tokens are those of each row alone."""
    logits = torch.zeros(40, 60_000)
    parts = list(sampling_contenders._search(logits, np.arange(40), np.zeros(40, dtype=np.float32)))
    assert max(len(part) for _, _, part in parts) <= 2**21 < sum(len(part) for _, _, part in parts) == logits.numel()
    assert [row for begin, end, _ in parts for row in range(begin, end)] == list(range(40))
    requests = [make_row(seed=index, top_p=0.999) for index in range(40)]
    drawn = sample(logits, requests)
    assert [sample(logits[[index]], [requests[index]])[0] for index in range(0, 40, 7)] == drawn[::7]
    assert all(may_be_drawn(logits[0].numpy(), requests[index], drawn[index][0]) for index in (0, 39))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(requests=st.lists(rows, min_size=1, max_size=6), candidates=st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_nothing_waits_for_the_device(requests: list[RowRequest], candidates: list[int]) -> None:
    """Off the CPU no number is looked at before the step's result is fetched: tensors on `meta` have none, and all shapes are right."""
    asked = [row._replace(candidates=count) for row, count in zip(requests, candidates, strict=False)]
    logits = torch.empty(len(asked), VOCAB, device="meta")
    forbid(logits, Masks([0], np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)))
    tokens, found, _ = Sampler().sample(logits, SamplingRows.build(asked))
    assert tokens.device.type == "meta" and len(tokens) == sum(row.draws for row in asked)
    assert found is None or len(found.token_ids) == len(found.rows) == sum(row.candidates > 0 for row in asked)
    scores = score_rows(logits.__getitem__, torch.empty(len(asked), dtype=torch.int64, device="meta"), np.arange(len(asked)))
    assert scores.top_ids.device.type == "meta" and len(scores.top_ids) == sum(range(len(asked)))

"""Sampled tokens follow the distribution that the settings define, and depend on their own row alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from octavo.core.sampler import NOT_FINITE, NOTHING_LEFT, Sampler
from octavo.core.sampling_params import SamplingParams
from octavo.core.sampling_rows import RowRequest, SamplingRows
from octavo.core.sampling_settings import RowSettings

DRAWS = 50_000


def _row(*, seed: int = 0, sample_index: int = 0, position: int = 0, num_output: int = 0, **settings: Any) -> RowRequest:
    stop_ids = settings.pop("stop_ids", ())
    row = {name: settings.pop(name) for name in ("draws", "candidates") if name in settings}
    made = RowSettings.of(SamplingParams(**settings), seed=seed, stop_ids=stop_ids)
    return RowRequest(made, sample_index, position, num_output, **row)


def _sample(logits: torch.Tensor, rows: Sequence[RowRequest], **options: Any) -> list[int]:
    return Sampler(**options).sample(logits.clone(), SamplingRows.build(rows)).token_ids.tolist()


def _logits(vocab: int, *, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def _expected(logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Probabilities by transformers' warpers, in the order in which `generate` applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(settings.get("temperature", 1.0)))])
    if "top_k" in settings:
        warpers.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        warpers.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        warpers.append(MinPLogitsWarper(settings["min_p"]))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits).softmax(-1)


_SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
    {"temperature": 2.5, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("guess", [16.0, float("inf")], ids=["contenders", "sorted"])
@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
def test_draws_follow_the_distribution_of_transformers_warpers(settings: dict[str, Any], guess: float) -> None:
    """50,000 draws: exactly the kept tokens occur, and their chi-square is within six standard deviations of its mean."""
    logits = _logits(40)
    expected = _expected(logits, settings)[0].double().numpy()
    drawn = _sample(logits, [_row(**settings, draws=DRAWS)], guess=guess)
    counts = np.bincount(drawn, minlength=40)
    kept = expected > 0
    assert not counts[~kept].any()
    assert counts[expected * DRAWS > 50].all()
    freedom = kept.sum() - 1
    chi_square = ((counts - expected * DRAWS)[kept] ** 2 / (expected * DRAWS)[kept]).sum()
    assert chi_square <= freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("vocab", [5000, 200_000])
@pytest.mark.parametrize(
    "settings", [{"temperature": 5.0, "top_p": 0.99}, {"top_p": 0.5}, {"top_k": 3000}, {"top_k": 50, "top_p": 0.9}], ids=str
)
def test_the_prefilter_changes_no_token(vocab: int, settings: dict[str, Any]) -> None:
    """Whether the likeliest 1,024 decide or the whole vocabulary must, the tokens are those of the exact path."""
    logits = _logits(vocab, rows=8)
    rows = [_row(**settings, seed=i, draws=5) for i in range(8)]
    assert _sample(logits, rows) == _sample(logits, rows, guess=float("inf"))


def test_top_k_keeps_all_that_tie_with_the_kth() -> None:
    """As transformers does; also where the tie goes on behind the prefilter."""
    logits = torch.full((1, 3000), -9.0)
    logits[0, [5, 2900, 1500, 70]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    for options in ({}, {"guess": float("inf")}):
        drawn = _sample(logits, [_row(top_k=2, draws=2000)], **options)
        assert set(drawn) == {5, 2900, 1500, 70} == set(_expected(logits, {"top_k": 2})[0].nonzero().flatten().tolist())


def test_top_p_keeps_the_lowest_ids_of_a_tie_at_its_edge() -> None:
    """As many as transformers keeps, always the same ones; also where the tie goes on behind the prefilter."""
    logits = torch.zeros(1, 2000)
    logits[0, 1234] = 5.0
    kept = int(_expected(logits, {"top_p": 0.2}).count_nonzero())
    assert 1 < kept < 1000
    for options in ({}, {"guess": float("inf")}):
        drawn = _sample(logits, [_row(top_p=0.2, draws=20_000)], **options)
        assert set(drawn) == {*range(kept - 1), 1234}


_MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.8, "top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_k": 2000, "top_p": 0.999},
    {"temperature": 1e-6},
    {"draws": 4},
    {"top_p": 0.5, "draws": 3},
]


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Each row alone, all together, and in reverse order: the same tokens."""
    logits = _logits(3000, rows=len(_MIXTURE))
    rows = [_row(**settings, seed=i, position=100 + i, sample_index=i % 2) for i, settings in enumerate(_MIXTURE)]
    alone = [_sample(logits[[i]], [row]) for i, row in enumerate(rows)]
    assert _sample(logits, rows) == [token for tokens in alone for token in tokens]
    assert _sample(logits.flip(0), rows[::-1]) == [token for tokens in alone[::-1] for token in tokens]


def test_draws_of_one_row_are_those_of_separate_rows() -> None:
    """The n samples of a first fork have sample indices 0 .. n - 1: each is the token that a row of its own would draw."""
    logits = _logits(500)
    together = _sample(logits, [_row(seed=7, position=9, draws=6)])
    assert together == [token for i in range(6) for token in _sample(logits, [_row(seed=7, position=9, sample_index=i)])]
    assert len(set(together)) > 1


@pytest.mark.parametrize("change", [{"seed": 2}, {"position": 5}, {"sample_index": 1}], ids=str)
def test_seed_position_and_sample_index_each_change_the_draw(change: dict[str, int]) -> None:
    """Over 64 rows of even logits no two settings give the same tokens; the same setting does."""
    logits = torch.zeros(64, 1000)
    rows = [_row(seed=1, position=10 * i) for i in range(64)]
    changed = [
        _row(**{"seed": 1, "position": 10 * i} | {name: value + 10 * i * (name == "position") for name, value in change.items()})
        for i in range(64)
    ]
    assert _sample(logits, rows) == _sample(logits, rows)
    assert sum(a == b for a, b in zip(_sample(logits, rows), _sample(logits, changed), strict=True)) <= 2


def test_negative_and_large_seeds_are_seeds() -> None:
    """Any 64-bit integer, signed or not."""
    logits = torch.zeros(3, 1000)
    assert len(set(_sample(logits, [_row(seed=seed) for seed in (-1, 2**63 - 1, -(2**63))]))) == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_small_temperatures_are_greedy(temperature: float) -> None:
    """Whatever else is set, the likeliest token comes, the lowest id of a tie."""
    logits = _logits(50, rows=3)
    logits[1, [9, 4]] = 100.0
    rows = [_row(temperature=temperature, top_k=9, seed=i) for i in range(3)]
    assert _sample(logits, rows) == logits.argmax(-1).tolist()
    assert _sample(logits, rows)[1] == 4


def test_the_smallest_random_temperature_overflows_nothing() -> None:
    """Logits of 1e4 at temperature 1e-5 stay finite; the likeliest token comes."""
    logits = _logits(50) * 1e4
    assert _sample(logits, [_row(temperature=1e-5, top_p=0.9), _row(temperature=1e-5)][:1]) == logits.argmax(-1).tolist()
    assert _sample(logits, [_row(temperature=1e-5)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}], ids=str)
def test_stop_ids_do_not_come_before_min_tokens(settings: dict[str, Any]) -> None:
    """Until min_tokens are out, stop ids have no probability, in that row only; then they come."""
    logits = torch.zeros(3, 20)
    logits[:, [3, 11]] = 50.0
    rows = [_row(**settings, min_tokens=4, num_output=n, stop_ids=stop) for n, stop in ((3, {3, 11}), (4, {3, 11}), (0, ()))]
    banned, allowed, none = _sample(logits, rows)
    assert banned not in {3, 11}
    assert {allowed, none} <= {3, 11}


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("guess", [16.0, float("inf")])
def test_a_row_without_a_finite_maximum_is_marked_and_alone(settings: dict[str, Any], guess: float) -> None:
    """All banned, a NaN, or an infinite logit: marked as what it is, and the neighbours' tokens are untouched."""
    logits = _logits(6, rows=5)
    logits[1, 2], logits[2, 3] = torch.nan, torch.inf
    rows = [_row(**settings, seed=i) for i in range(5)]
    rows[3] = _row(**settings, seed=3, min_tokens=1, stop_ids=range(6))
    tokens = _sample(logits, rows, guess=guess)
    assert tokens[1:4] == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT]
    assert [tokens[0], tokens[4]] == _sample(logits[[0, 4]], [rows[0], rows[4]])


def test_candidates_of_beams() -> None:
    """Their rows get the likeliest tokens with log probabilities, ties by id; they draw nothing, and the other rows are drawn."""
    logits = _logits(100, rows=3)
    logits[2, [80, 7, 33]] = 20.0
    rows = [_row(temperature=0.0, draws=0, candidates=4), _row(temperature=0.0), _row(temperature=0.0, draws=0, candidates=6)]
    tokens, candidates, _ = Sampler().sample(logits.clone(), SamplingRows.build(rows))
    assert tokens.tolist() == [int(logits[1].argmax())]
    assert candidates is not None
    assert candidates.rows == [0, 2]
    assert candidates.token_ids.shape == candidates.log_probs.shape == (2, 6)
    best = logits[[0, 2]].log_softmax(-1).topk(6)
    torch.testing.assert_close(candidates.log_probs, best.values)
    assert candidates.token_ids[0].tolist() == best.indices[0].tolist()
    assert candidates.token_ids[1, :3].tolist() == [7, 33, 80]


def test_more_candidates_than_tokens() -> None:
    """Then all tokens are candidates."""
    _, candidates, _ = Sampler().sample(_logits(5), SamplingRows.build([_row(draws=0, candidates=8)]))
    assert candidates is not None
    assert sorted(candidates.token_ids[0].tolist()) == [0, 1, 2, 3, 4]


def test_bf16_logits_are_sampled_in_fp32() -> None:
    """Like their fp32 copies, and without a change to the caller's tensor."""
    logits = _logits(400, rows=6).bfloat16()
    rows = [_row(seed=i, top_p=0.9, min_tokens=1, stop_ids={1}) for i in range(6)]
    assert Sampler().sample(logits, SamplingRows.build(rows)).token_ids.tolist() == _sample(logits.float(), rows)


def test_a_step_without_rows() -> None:
    """A step that samples nothing gives nothing."""
    rows = SamplingRows.build([])
    assert Sampler().sample(torch.zeros(0, 5), rows).token_ids.shape == (0,)

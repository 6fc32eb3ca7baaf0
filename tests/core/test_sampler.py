"""Sampled tokens follow the distribution that the settings define, and depend on their own row alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.core.sampler import NOT_FINITE, NOTHING_LEFT, Sampler
from octavo.core.sampling_contenders import FIRST_GUESS
from octavo.core.sampling_rows import RowRequest, SamplingRows
from tests.core.sampling_reference import make_row

DRAWS = 50_000


def _sample(logits: torch.Tensor, rows: Sequence[RowRequest], **options: Any) -> list[int]:
    return Sampler(**options).sample(logits.clone(), SamplingRows.build(rows)).token_ids.tolist()


def _logits(vocab: int, *, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def _expected(logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Probabilities by transformers' processors, in the order in which `generate` applies them."""
    processors = LogitsProcessorList()
    if "logit_bias" in settings:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in settings["logit_bias"].items()}))
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(float(settings.get("temperature", 1.0))))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        processors.append(MinPLogitsWarper(settings["min_p"]))
    return processors(torch.tensor([[*settings.get("prompt", [0]), *settings.get("output", [])]]), logits.clone()).softmax(-1)


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
    {"logit_bias": {5: 4.0, 130: -100.0, 299: 6.5}},
    {"repetition_penalty": 1.7, "prompt": [4, 4, 200], "output": [9, 131, 9]},
    {"logit_bias": {7: 5.0}, "repetition_penalty": 0.6, "prompt": [7], "output": [8], "temperature": 0.8, "top_p": 0.9},
]


@pytest.mark.parametrize("guess", [FIRST_GUESS, np.inf], ids=["contenders", "sorted"])
@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
def test_draws_follow_the_distribution_of_transformers_processors(settings: dict[str, Any], guess: float) -> None:
    """50,000 draws: only tokens that are kept occur, and their chi-square is within three standard deviations of its mean."""
    logits = _logits(300)
    expected = _expected(logits, settings)[0].double().numpy() * DRAWS
    counts = np.bincount(_sample(logits, [make_row(**settings, draws=DRAWS)], guess=guess), minlength=300)
    assert not counts[expected == 0].any()
    _check_chi_square(counts, expected)


def test_draws_with_presence_and_frequency_penalties() -> None:
    """The same with what transformers doesn't have: softmax of logits less presence and count times frequency."""
    logits, output = _logits(300), [3, 250, 3, 3, 17]
    penalised = logits[0].clone()
    for token in output:
        penalised[token] -= 0.6
    for token in set(output):
        penalised[token] -= -0.9
    row = make_row(draws=DRAWS, prompt=[40, 41], output=output, frequency_penalty=0.6, presence_penalty=-0.9)
    counts = np.bincount(_sample(logits, [row]), minlength=300)
    _check_chi_square(counts, penalised.softmax(-1).double().numpy() * DRAWS)


def _check_chi_square(counts: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> None:
    """Over tokens that are expected five times or more, and all others together."""
    common = expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    assert ((seen - wanted) ** 2 / wanted).sum() <= freedom + 3 * (2 * freedom) ** 0.5 + 1e-6


@pytest.mark.parametrize("vocab", [5000, 200_000])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 5.0, "top_p": 0.99},
        {"top_p": 0.5},
        {"top_k": 3000},
        {"top_k": 50, "top_p": 0.9},
        {"min_p": 1e-3},
        {"top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_neither_the_guess_nor_sorting_changes_a_token(vocab: int, settings: dict[str, Any]) -> None:
    """Whether the first guess at a bound held, the next one, or none: the tokens are those of the sorted row."""
    logits = _logits(vocab, rows=8)
    rows = [make_row(**settings, seed=i, draws=5) for i in range(8)]
    in_order = _sample(logits, rows, guess=np.inf)
    assert all(_sample(logits, rows, guess=guess) == in_order for guess in (1e9, FIRST_GUESS, 1.0, 0.0))


def test_top_k_keeps_all_that_tie_with_the_kth() -> None:
    """As transformers does; in both ways."""
    logits = torch.full((1, 3000), -9.0)
    logits[0, [5, 2900, 1500, 70]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    for options in ({}, {"guess": np.inf}):
        drawn = _sample(logits, [make_row(top_k=2, draws=2000)], **options)
        assert set(drawn) == {5, 2900, 1500, 70} == set(_expected(logits, {"top_k": 2})[0].nonzero().flatten().tolist())


def test_top_p_keeps_the_lowest_ids_of_a_tie_at_its_edge() -> None:
    """As many as transformers keeps, always the same ones; in both ways."""
    logits = torch.zeros(1, 2000)
    logits[0, 1234] = 5.0
    kept = int(_expected(logits, {"top_p": 0.2}).count_nonzero())
    assert 1 < kept < 1000
    for options in ({}, {"guess": np.inf}):
        drawn = _sample(logits, [make_row(top_p=0.2, draws=20_000)], **options)
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
    rows = [make_row(**settings, seed=i, position=100 + i, sample_index=i % 2) for i, settings in enumerate(_MIXTURE)]
    alone = [_sample(logits[[i]], [row]) for i, row in enumerate(rows)]
    assert _sample(logits, rows) == [token for tokens in alone for token in tokens]
    assert _sample(logits.flip(0), rows[::-1]) == [token for tokens in alone[::-1] for token in tokens]


def test_draws_of_one_row_are_those_of_separate_rows() -> None:
    """The n samples of a first fork have sample indices 0 .. n - 1: each is the token that a row of its own would draw."""
    logits = _logits(500)
    together = _sample(logits, [make_row(seed=7, position=9, draws=6)])
    assert together == [token for i in range(6) for token in _sample(logits, [make_row(seed=7, position=9, sample_index=i)])]
    assert len(set(together)) > 1


@pytest.mark.parametrize("change", [{"seed": 2}, {"position": 5}, {"sample_index": 1}], ids=str)
def test_seed_position_and_sample_index_each_change_the_draw(change: dict[str, int]) -> None:
    """Over 64 rows of even logits no two settings give the same tokens; the same setting does."""
    logits = torch.zeros(64, 1000)
    rows = [make_row(seed=1, position=10 * i) for i in range(64)]
    changed = [
        make_row(**{"seed": 1, "position": 10 * i} | {name: value + 10 * i * (name == "position") for name, value in change.items()})
        for i in range(64)
    ]
    assert _sample(logits, rows) == _sample(logits, rows)
    assert sum(a == b for a, b in zip(_sample(logits, rows), _sample(logits, changed), strict=True)) <= 2


def test_negative_and_large_seeds_are_seeds() -> None:
    """Any 64-bit integer, signed or not."""
    logits = torch.zeros(3, 1000)
    assert len(set(_sample(logits, [make_row(seed=seed) for seed in (-1, 2**63 - 1, -(2**63))]))) == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_small_temperatures_are_greedy(temperature: float) -> None:
    """Whatever else is set, the likeliest token comes, the lowest id of a tie."""
    logits = _logits(50, rows=3)
    logits[1, [9, 4]] = 100.0
    rows = [make_row(temperature=temperature, top_k=9, seed=i) for i in range(3)]
    assert _sample(logits, rows) == logits.argmax(-1).tolist()
    assert _sample(logits, rows)[1] == 4


def test_the_smallest_random_temperature_overflows_nothing() -> None:
    """Logits of 1e4 at temperature 1e-5 stay finite; the likeliest token comes."""
    logits = _logits(50) * 1e4
    assert _sample(logits, [make_row(temperature=1e-5, top_p=0.9), make_row(temperature=1e-5)][:1]) == logits.argmax(-1).tolist()
    assert _sample(logits, [make_row(temperature=1e-5)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}], ids=str)
def test_stop_ids_do_not_come_before_min_tokens(settings: dict[str, Any]) -> None:
    """Until min_tokens are out, stop ids have no probability, in that row only; then they come."""
    logits = torch.zeros(3, 20)
    logits[:, [3, 11]] = 50.0
    rows = [make_row(**settings, min_tokens=4, output=[0] * n, stop_ids=stop) for n, stop in ((3, {3, 11}), (4, {3, 11}), (0, ()))]
    banned, allowed, none = _sample(logits, rows)
    assert banned not in {3, 11}
    assert {allowed, none} <= {3, 11}


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("guess", [FIRST_GUESS, np.inf])
def test_a_row_without_a_finite_maximum_is_marked_and_alone(settings: dict[str, Any], guess: float) -> None:
    """All banned, a NaN, or an infinite logit: marked as what it is, and the neighbours' tokens are untouched."""
    logits = _logits(6, rows=5)
    logits[1, 2], logits[2, 3] = torch.nan, torch.inf
    rows = [make_row(**settings, seed=i) for i in range(5)]
    rows[3] = make_row(**settings, seed=3, min_tokens=1, stop_ids=range(6))
    tokens = _sample(logits, rows, guess=guess)
    assert tokens[1:4] == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT]
    assert [tokens[0], tokens[4]] == _sample(logits[[0, 4]], [rows[0], rows[4]])


def test_candidates_of_beams() -> None:
    """Their rows get the likeliest tokens with log probabilities, ties by id; they draw nothing, and the other rows are drawn."""
    logits = _logits(100, rows=3)
    logits[2, [80, 7, 33]] = 20.0
    rows = [make_row(temperature=0.0, draws=0, candidates=4), make_row(temperature=0.0), make_row(temperature=0.0, draws=0, candidates=6)]
    tokens, candidates, _ = Sampler().sample(logits.clone(), SamplingRows.build(rows))
    assert tokens.tolist() == [int(logits[1].argmax())]
    assert candidates is not None
    assert candidates.rows == [0, 2]
    assert candidates.token_ids.shape == candidates.log_probs.shape == (2, 6)
    best = logits[[0, 2]].log_softmax(-1).topk(6)
    torch.testing.assert_close(candidates.log_probs, best.values)
    assert candidates.token_ids[0].tolist() == best.indices[0].tolist()
    assert candidates.token_ids[1, :3].tolist() == [7, 33, 80]


def test_of_equal_candidates_the_lowest_ids_are_kept() -> None:
    """Also of those that tie for the last places."""
    logits = torch.zeros(1, 5000)
    logits[0, [4000, 20]] = 1.0
    _, candidates, _ = Sampler().sample(logits, SamplingRows.build([make_row(temperature=0.0, draws=0, candidates=6)]))
    assert candidates is not None
    assert candidates.token_ids.tolist() == [[20, 4000, 0, 1, 2, 3]]


def test_more_candidates_than_tokens() -> None:
    """Then all tokens are candidates."""
    _, candidates, _ = Sampler().sample(_logits(5), SamplingRows.build([make_row(draws=0, candidates=8)]))
    assert candidates is not None
    assert sorted(candidates.token_ids[0].tolist()) == [0, 1, 2, 3, 4]


def test_bf16_logits_are_sampled_in_fp32() -> None:
    """Like their fp32 copies, and without a change to the caller's tensor."""
    logits = _logits(400, rows=6).bfloat16()
    rows = [make_row(seed=i, top_p=0.9, min_tokens=1, stop_ids={1}) for i in range(6)]
    assert Sampler().sample(logits, SamplingRows.build(rows)).token_ids.tolist() == _sample(logits.float(), rows)


def test_a_step_without_rows() -> None:
    """A step that samples nothing gives nothing."""
    rows = SamplingRows.build([])
    assert Sampler().sample(torch.zeros(0, 5), rows).token_ids.shape == (0,)

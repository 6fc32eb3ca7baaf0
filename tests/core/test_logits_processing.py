"""What changes logits, against transformers' processors and plain loops; users' functions, good and bad."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from octavo.core.errors import RequestError
from octavo.core.logits_processing import process_logits
from octavo.core.sampling_params import SamplingParams
from octavo.core.sampling_rows import RowRequest, SamplingRows
from octavo.core.sampling_settings import RowSettings
from tests.core.sampling_reference import make_row

VOCAB = 60
PROMPT, OUTPUT = [3, 9, 3, 40], [9, 11, 12, 11, 11]


def _logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3


def _processed(logits: torch.Tensor, *rows: RowRequest) -> torch.Tensor:
    changed = logits.clone()
    assert process_logits(changed, SamplingRows.build(rows)) == {}
    return changed


def _ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def test_a_row_that_asks_for_nothing_is_unchanged() -> None:
    """Beside rows that ask for everything."""
    logits = _logits(3)
    everything = make_row(
        prompt=PROMPT,
        output=OUTPUT,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={4: 2.0},
        allowed_token_ids=[1, 4, 9],
        bad_words=[[9]],
        logits_processors=[lambda output, row: row + 1],
    )
    changed = _processed(logits, everything, make_row(prompt=PROMPT, output=OUTPUT), everything)
    assert torch.equal(changed[1], logits[1])
    assert torch.equal(_processed(logits[:1], everything)[0], changed[0])
    assert changed[0].isfinite().nonzero().flatten().tolist() == [1, 4]


def test_repetition_penalty_as_transformers() -> None:
    """Over prompt and output, each token once, positive logits divided and negative ones multiplied; each row by its own."""
    logits = _logits(4)
    penalties = (1.2, 1.0, 0.7, 100.0)
    changed = _processed(logits, *(make_row(prompt=PROMPT, output=OUTPUT, repetition_penalty=penalty) for penalty in penalties))
    for row, penalty in enumerate(penalties):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(_ids(*PROMPT, *OUTPUT), logits[[row]].clone())
        torch.testing.assert_close(changed[row], expected[0])
    assert not torch.equal(changed[0], logits[0])


def test_presence_and_frequency_penalties_as_a_plain_loop() -> None:
    """Over the output alone; after the repetition penalty."""
    logits = _logits(2)
    row = make_row(prompt=PROMPT, output=OUTPUT, frequency_penalty=0.3, presence_penalty=-1.1)
    both = make_row(prompt=PROMPT, output=OUTPUT, frequency_penalty=-2, presence_penalty=2, repetition_penalty=1.5)
    first = logits[0].clone()
    for token in OUTPUT:
        first[token] -= 0.3
    for token in (9, 11, 12):
        first[token] -= -1.1
    second = RepetitionPenaltyLogitsProcessor(1.5)(_ids(*PROMPT, *OUTPUT), logits[[1]].clone())[0]
    for token in OUTPUT:
        second[token] -= -2
    for token in (9, 11, 12):
        second[token] -= 2
    torch.testing.assert_close(_processed(logits, row, both), torch.stack((first, second)))


@pytest.mark.parametrize("output", [[], [9], [11, 12], [12, 11], [5, 11, 12, 11], [11, 11]], ids=str)
def test_bad_words_as_transformers(output: list[int]) -> None:
    """One token: always; several: the last one where the output ends with the others, never the prompt."""
    words = [[7], [9, 20], [11, 12, 11], [12, 11, 30], [11, 11]]
    row = make_row(prompt=[11, 12, 9], output=output, bad_words=words)
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([0]))(torch.tensor([output], dtype=torch.int64), _logits(1))
    assert torch.equal(_processed(_logits(1), row), expected)


def test_biases_as_transformers() -> None:
    """Added; a banned token stays banned."""
    bias = {3: 100.0, 17: -2.5, 59: 0.125}
    changed = _processed(_logits(1), make_row(logit_bias=bias))
    assert torch.equal(changed, SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(_ids(0), _logits(1)))
    assert _processed(_logits(1), make_row(logit_bias=bias, bad_words=[[3]]))[0, 3] == -torch.inf


def test_allowed_tokens_as_transformers() -> None:
    """No others keep a finite logit."""
    allowed = [0, 59, 30, 30]
    others = [token for token in range(VOCAB) if token not in allowed]
    expected = SuppressTokensLogitsProcessor(others)(_ids(0), _logits(2)[:1])
    changed = _processed(_logits(2), make_row(allowed_token_ids=allowed), make_row())
    assert torch.equal(changed[:1], expected) and torch.equal(changed[1], _logits(2)[1])


@pytest.mark.parametrize("length", [0, 2, 3, 4])
def test_min_tokens_as_transformers(length: int) -> None:
    """Stop ids are banned until so many tokens are out."""
    stop_ids = [1, 30]
    expected = MinNewTokensLengthLogitsProcessor(2, 3, torch.tensor(stop_ids))(_ids(*[5] * (2 + length)), _logits(1))
    changed = _processed(_logits(1), make_row(prompt=[5, 5], output=[5] * length, min_tokens=3, stop_ids=stop_ids))
    assert torch.equal(changed, expected)
    assert bool(changed.isinf().any()) == (length < 3)


def test_the_order_is_that_of_vllm() -> None:
    """Users' functions see bans and biases and no penalties, and may keep what they saw; a penalty sees the biased, processed logit."""
    seen: list[torch.Tensor] = []

    def halve(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return logits * 0.5

    logits = torch.tensor([[-1.0, 2.0, 3.0, 4.0]])
    row = make_row(
        output=[0, 1],
        allowed_token_ids=[0, 1, 3],
        bad_words=[[3]],
        logit_bias={0: 7.0, 3: 50.0},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        logits_processors=[halve],
    )
    changed = _processed(logits, row)
    assert [logits.tolist() for logits in seen] == [[6.0, 2.0, -torch.inf, -torch.inf]]
    assert changed.tolist() == [[1.25, 0.25, -torch.inf, -torch.inf]]


# ----------------------------------------------------------------- users' functions


class Callable3:
    """An object with three parameters besides itself."""

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return two(output, three(prompt, output, logits))


def two(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[sum(output)] += 1
    return logits


def three(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[sum(prompt)] += 10
    return logits


def with_options(output: list[int], logits: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
    logits[sum(output)] += by
    return logits


@pytest.mark.parametrize(
    ("function", "added"),
    [
        (two, {5: 1}),
        (three, {3: 10}),
        (Callable3(), {5: 1, 3: 10}),
        (with_options, {5: 1}),
        (functools.partial(with_options, by=4.0), {5: 4}),
        (functools.partial(three, [20]), {20: 10}),
        (lambda *arguments: arguments[1] + (len(arguments) == 2), dict.fromkeys(range(VOCAB), 1)),
    ],
    ids=["two", "three", "object", "options", "partial", "partial of three", "any number"],
)
def test_functions_are_called_by_what_they_take(function: Callable[..., Any], added: dict[int, float]) -> None:
    """Told apart by their parameters without defaults of their own names."""
    logits = _logits(1)
    expected = logits.clone()
    for token, value in added.items():
        expected[0, token] += value
    torch.testing.assert_close(_processed(logits, make_row(prompt=[1, 2], output=[4, 1], logits_processors=[function])), expected)


@pytest.mark.parametrize("function", [lambda logits: logits, lambda a, b, c, d: d, lambda: None], ids=["one", "four", "none"])
def test_functions_of_other_parameters_are_refused(function: Callable[..., Any]) -> None:
    """When the request is submitted, by the name of the parameter."""
    with pytest.raises(RequestError, match=r"logits_processors\[1\] takes \(.*\): must take \(output ids, logits\) or") as raised:
        RowSettings.of(SamplingParams(logits_processors=[two, function]), seed=0)
    assert raised.value.field == "logits_processors"


def test_functions_run_in_their_order_and_cannot_change_the_sequence() -> None:
    """Each sees the result of the one before; the lists of ids are their own."""

    def first(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        prompt.clear()
        output.append(99)
        return logits.fill_(2.0)

    def second(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits * 3 + len(output)

    row = make_row(prompt=[1], output=[4, 1], logits_processors=[first, second])
    assert _processed(_logits(1), row)[0].tolist() == [8.0] * VOCAB
    assert (row.prompt, row.output) == ((1,), [4, 1])


def _raises(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits.fill_(torch.nan)
    raise ValueError("no such token")


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raises_unprintable(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise _Unprintable


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_raises, "logits_processors[0] raised ValueError: no such token"),
        (_raises_unprintable, "logits_processors[0] raised"),
        (
            lambda o, x: x[:-1],
            "logits_processors[0] returned shape (59,), torch.float32 on cpu: must return shape (60,), torch.float32 on cpu",
        ),
        (lambda o, x: x[None], "logits_processors[0] returned shape (1, 60), torch.float32 on cpu: must return shape (60,)"),
        (lambda o, x: x.half(), "logits_processors[0] returned shape (60,), torch.float16 on cpu: must return shape (60,), torch.float32"),
        (lambda o, x: None, "logits_processors[0] returned NoneType: must return the logits, a tensor"),
        (lambda o, x: x.tolist(), "logits_processors[0] returned list: must return the logits, a tensor"),
        (lambda o, x: x.to_sparse(), "logits_processors[0] returned a sparse or nested tensor: must return a dense one"),
    ],
    ids=["raises", "raises what cannot be printed", "shorter", "batched", "half", "nothing", "list", "sparse"],
)
def test_a_function_that_misbehaves_is_an_error_of_its_row(function: Callable[..., Any], message: str) -> None:
    """In words that say which function and what it did; the neighbours' logits are as without it."""
    logits = _logits(3)
    fine = make_row(output=[1], logits_processors=[two])
    errors = process_logits(changed := logits.clone(), SamplingRows.build([fine, make_row(logits_processors=[function, two]), fine]))
    assert list(errors) == [1] and errors[1].startswith(message)
    assert torch.equal(changed[[0, 2]], _processed(logits[[0, 2]], fine, fine))

"""Penalties, bans and users' functions through the engine on a tiny model: preempted, rolled back, in company, and where they fail.

Expected tokens come from transformers' logits of the whole prefix and the slow reference; the engine has no part in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from octavo.core.errors import RequestError
from octavo.core.request import Request
from octavo.core.text.tokenizer import Tokenizer
from octavo.core.torch_handle import ALL_BANNED
from tests.core.sampling_reference import distribution, make_row, may_be_drawn, processed
from tests.models import PROMPTS, VOCAB
from tests.tensor_rig import TensorRig, logits_after, make_kv

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 2.0, "presence_penalty": 1.5},
    {"repetition_penalty": 1.4, "frequency_penalty": -1.0, "logit_bias": {7: 3.0, 9: -50.0}},
    {"presence_penalty": 2.0, "temperature": 0.8, "top_p": 0.9, "seed": 4},
]
LENGTH = 16


def alone(rig: TensorRig, prompt: Sequence[int], **params: Any) -> list[int]:
    """Greedy tokens by the reference."""
    output: list[int] = []
    while len(output) < LENGTH:
        row = make_row(prompt=prompt, output=output, temperature=0, **params)
        probabilities = distribution(processed(logits_after(rig.folder, (*prompt, *output)).numpy(), row), row)
        output.append(int(probabilities.argmax()))
    return output


def add(rig: TensorRig, number: int, **params: Any) -> Request:
    return rig.add(PROMPTS[number % len(PROMPTS)][:9], LENGTH, **params)


def check(rig: TensorRig, request: Request, sample_index: int = 0, **params: Any) -> None:
    """Each token of the answer may be drawn by the reference after those before it; greedy ones are exactly the reference's."""
    tokens = rig.tokens(request)[sample_index]
    assert len(tokens) == LENGTH
    if request.params.greedy:
        assert tokens == alone(rig, request.prompt, **params)
        return
    for length, token in enumerate(tokens):
        row = make_row(prompt=request.prompt, output=tokens[:length], sample_index=sample_index, **({"seed": request.seed} | params))
        logits = logits_after(rig.folder, (*request.prompt, *tokens[:length])).numpy()
        assert may_be_drawn(logits, row, token, margin=1e-3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slots", [400, 80], ids=["ample", "preempting"])
def test_penalties_stay_with_their_request(slots: int, depth: int) -> None:
    """While rows come, go, move and are preempted (fault 35): each request's tokens are those that it has alone."""
    rig = TensorRig(make_kv("paged-4", slots), depth=depth)
    requests = []
    for number, params in enumerate([*PENALTIES, *PENALTIES[:2]]):
        rig.add(PROMPTS[number][:5], 2 + number, temperature=1.0, seed=number)  # short ones, whose rows end before
        requests.append((add(rig, number, **params), params))
        rig.step()
    rig.finish()
    assert any(report.num_preempted for report in rig.reports) == (slots == 80)
    for request, params in requests:
        check(rig, request, **params)
    plain = alone(rig, PROMPTS[0][:9])
    assert any(plain != alone(rig, PROMPTS[0][:9], **params) for params in PENALTIES[:3])  # else nothing was shown


def test_penalties_after_a_step_that_failed() -> None:
    """It is rolled back and computed again: no token is counted twice."""
    rig = TensorRig(make_kv("paged-4", 400))
    requests = [(add(rig, number, **params), params) for number, params in enumerate(PENALTIES[:3])]
    forward, calls = rig.runner.model.forward, iter(range(1000))

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) % 3 == 2:
            raise RuntimeError("out of luck")
        return forward(*args, **kwargs)

    rig.runner.model.forward = failing  # type: ignore[method-assign]
    try:
        assert rig.finish(failure=RuntimeError) > 3
    finally:
        del rig.runner.model.forward
    for request, params in requests:
        check(rig, request, **params)


def test_samples_of_one_request_have_their_own_counts() -> None:
    """n > 1 with one seed and penalties: different texts, each by its own output, the same set again (fault 33)."""
    params: dict[str, Any] = {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "temperature": 1.0, "seed": 11}
    answers = []
    for company in (0, 3):
        rig = TensorRig(make_kv("paged-4", 600))
        for number in range(company):
            rig.add(PROMPTS[number], 5, temperature=1.0, presence_penalty=1.0)
        request = add(rig, 2, n=3, **params)
        rig.finish()
        for index in range(3):
            check(rig, request, index, **params)
        answers.append(rig.tokens(request))
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 3


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.3}, {"top_p": 0.9, "min_p": 0.02}, {"top_k": 7}], ids=str)
def test_a_seed_gives_the_same_tokens_with_other_batch_mates(params: dict[str, Any]) -> None:
    """Alone, and among rows of all kinds (fault 34)."""
    answers = []
    for company in ([], PENALTIES, [{"temperature": 1.0, "top_k": 3}, {"temperature": 2.0}, {}]):
        rig = TensorRig(make_kv("paged-4", 600))
        for number, mate in enumerate(company):
            add(rig, number, **mate)
            rig.step()
        request = add(rig, 1, seed=5, temperature=1.0, **params)
        rig.finish()
        answers.append(rig.tokens(request))
    assert answers[0] == answers[1] == answers[2]


def test_a_tiny_temperature_with_penalties_is_greedy() -> None:
    """1e-6 gives the likeliest of the penalised tokens, without infinities (fault 32)."""
    rig = TensorRig(make_kv("paged-4", 400))
    request = add(rig, 0, temperature=1e-6, top_p=0.5, **PENALTIES[0])
    rig.finish()
    assert rig.tokens(request) == [alone(rig, request.prompt, **PENALTIES[0])]


def test_bad_words_and_allowed_ids_hold() -> None:
    """Texts become ids once, with the engine's tokenizer; a word of several tokens is cut off before its last one."""
    rig = TensorRig(make_kv("paged-4", 400))
    free = add(rig, 0)
    rig.finish()
    rig.engine.tokenizer = Tokenizer.from_folder(rig.folder)
    output = rig.tokens(free)[0]
    pair = next((a, b) for a, b in itertools.pairwise(output) if max(a, b) < 128)  # bytes: letters of their own
    words = [rig.engine.tokenizer.decode(pair)]
    banned = add(rig, 0, bad_words=words)
    (ids,) = banned.bad_words
    assert rig.engine.tokenizer.decode(ids) == words[0].lstrip()
    narrow = add(rig, 0, allowed_token_ids=[3, 5, 200], temperature=1.0)
    rig.finish()
    assert rig.tokens(banned) == [alone(rig, banned.prompt, bad_words=banned.bad_words)]
    assert set(rig.tokens(narrow)[0]) <= {3, 5, 200}


# ----------------------------------------------------------------------- what fails


def failing(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) == 2:
        raise LookupError("the third token is too much for me")
    return logits


def ban_all(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf) if len(output) == 2 else logits


@pytest.mark.parametrize(
    ("params", "tokens", "error"),
    [
        ({"logits_processors": [failing]}, 2, "logits_processors[0] raised LookupError: the third token is too much for me"),
        ({"logits_processors": [lambda o, x: x[1:]]}, 0, f"logits_processors[0] returned shape ({VOCAB - 1},), torch.float32 on cpu: must"),
        ({"logits_processors": [lambda o, x: x.double()]}, 0, "logits_processors[0] returned shape"),
        ({"logits_processors": [ban_all]}, 2, ALL_BANNED),
        ({"allowed_token_ids": [8], "stop_token_ids": [8], "min_tokens": 1}, 0, ALL_BANNED),
    ],
    ids=["raises", "shape", "dtype", "bans all", "nothing allowed"],
)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_only_the_request_that_cannot_be_sampled_fails(params: dict[str, Any], tokens: int, error: str, temperature: float) -> None:
    """With what it has and an error that says why; its neighbours end as they do alone."""
    rig = TensorRig(make_kv("paged-4", 400))
    before, bad, after = add(rig, 0), add(rig, 1, temperature=temperature, **params), add(rig, 2, **PENALTIES[0])
    rig.finish()
    (output,) = rig.answers[bad.id].outputs
    assert (output.finish_reason, len(output.token_ids)) == ("error", tokens)
    assert output.error is not None and output.error.startswith(error)
    check(rig, before)
    check(rig, after, **PENALTIES[0])


def test_functions_are_told_apart_and_refused_at_submit() -> None:
    """Before anything runs; the engine takes others."""
    rig = TensorRig(make_kv("paged-4", 400))
    with pytest.raises(RequestError, match=r"logits_processors\[0\] takes \(logits\)"):
        add(rig, 0, logits_processors=[lambda logits: logits])
    with pytest.raises(RequestError, match="this engine has no tokenizer"):
        add(rig, 0, bad_words=["x"])
    assert not rig.engine.requests


def test_a_function_sees_prompt_and_output() -> None:
    """Of its own sequence, all tokens before the one to be chosen, in every step."""
    seen: list[tuple[list[int], list[int]]] = []

    def watch(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output))
        return logits

    rig = TensorRig(make_kv("paged-4", 400), depth=2)
    add(rig, 0)
    request = add(rig, 1, logits_processors=[watch], temperature=1.0)
    rig.finish()
    (tokens,) = rig.tokens(request)
    assert seen == [(list(request.prompt), tokens[:length]) for length in range(LENGTH)]

"""Teacher forcing through an engine: the same as transformers' own logits."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.bench.ablation.forcing import Scores, perplexity, score
from tests.models import PROMPTS, reference_model, reference_tokens, tiny
from tests.tensor_rig import MAX_MODEL_LEN, TensorRig, make_kv


@pytest.fixture
def rig() -> TensorRig:
    return TensorRig(make_kv("paged-16", 256))


def test_scores_are_those_of_transformers(rig: TensorRig) -> None:
    """Of the answer's tokens alone, each in its place: greedy ones are no distance off, others as far as the logits say."""
    prompts = [list(prompt) for prompt in PROMPTS[1:4]]
    answers = [list(tokens) for tokens in reference_tokens(tiny("llama_gqa"), PROMPTS[1:4], 6)]
    answers[1][3] = (answers[1][3] + 1) % 384
    told = []
    found = score(rig.engine, list(zip(prompts, answers, strict=True)), progress=lambda: told.append(1))
    assert len(told) == 3
    for prompt, answer, scores in zip(prompts, answers, found, strict=True):
        logits = reference_model(tiny("llama_gqa"))(torch.tensor([[*prompt, *answer]])).logits[0].detach().double()
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        expected = [float(logits[i].max() - logits[i, token]) for i, token in zip(places, answer, strict=True)]
        assert scores.distances == pytest.approx(expected, abs=1e-3)
        assert scores.logprobs == pytest.approx(
            [float(logits[i].log_softmax(-1)[token]) for i, token in zip(places, answer, strict=True)], abs=1e-3
        )
    assert found[0].distances == [0.0] * 6 and found[1].distances[3] > 1e-3
    assert not rig.engine.has_work


def test_a_full_context(rig: TensorRig) -> None:
    """Its last token is left out: nothing could be sampled behind it."""
    (scores,) = score(rig.engine, [([1] * 40, [2] * (MAX_MODEL_LEN - 40))])
    assert len(scores.distances) == MAX_MODEL_LEN - 41


def test_perplexity() -> None:
    """Over all tokens alike, whatever answer they are in."""
    assert perplexity([Scores([], [-1.0, -2.0]), Scores([], [-3.0])]) == pytest.approx(math.exp(2.0))
    assert math.isnan(perplexity([]))

"""The real runner scores tokens: what it gives is what transformers' log_softmax gives, through pieces, preemption, failures and drafts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence as Seq
from typing import Any

import pytest
import torch

from octavo.core import scoring
from octavo.core.execution import StepResult
from octavo.core.logprobs import TokenLogprobs
from octavo.core.model import Attend, Model
from octavo.core.request import Request, Sequence
from octavo.core.torch_handle import TorchHandle
from tests.core.test_torch_runner import Pieces, Wrapped
from tests.logprobs import check_entries, reference_logits
from tests.models import PROMPTS
from tests.tensor_rig import TensorRig, make_kv

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


def check(rig: TensorRig, request: Request) -> None:
    """All that the request asks for is there and right, and its tokens are those of a request that asks for nothing."""
    params, prompt = request.params, request.prompt
    assert rig.tokens(request) == rig.expected(request)
    if params.prompt_logprobs is not None:
        check_entries(request.prompt_logprobs, reference_logits(rig.folder, prompt)[:-1], prompt[1:], params.prompt_logprobs)
    for sequence in request.finished:
        if params.num_logprobs is not None:
            logits = reference_logits(rig.folder, (*prompt, *sequence.output))[len(prompt) - 1 : -1]
            check_entries(sequence.logprobs, logits, sequence.output, params.num_logprobs)
            assert sequence.score == pytest.approx(sum(entry.logprob for entry in sequence.logprobs))


def add_all(rig: TensorRig, **params: Any) -> list[Request]:
    """Requests that ask for everything, for one thing and for nothing."""
    return [
        rig.add(PROMPTS[2], 12, n=3, prompt_logprobs=0, logprobs=0, **SAMPLED),  # three draws of one row, and others behind it
        rig.add(PROMPTS[5], 6, prompt_logprobs=3, logprobs=2),
        rig.add(PROMPTS[1], 12),
        rig.add(PROMPTS[4], 10, prompt_logprobs=1, **SAMPLED),
        rig.add(PROMPTS[0], 9, prompt_logprobs=1, logprobs=5, **params),
        rig.add(PROMPTS[3], 8, logprobs=1, **SAMPLED),
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("scheduler", [None, Pieces], ids=["whole", "pieces"])
def test_values_are_those_of_transformers(scheduler: Any, depth: int) -> None:
    """Whole prompts and pieces of three tokens, one to three steps in flight, samples that part; whoever asks for nothing gets nothing."""
    rig = TensorRig(make_kv("paged-4", 400), depth=depth, **({"scheduler": scheduler} if scheduler else {}))
    requests = add_all(rig)
    rig.finish()
    for request in requests:
        check(rig, request)
    assert not requests[2].prompt_logprobs and not requests[2].finished[0].logprobs


class Broken(RuntimeError):
    """What the test's model raises."""


def failing(at: set[int]) -> Callable[[Model], Model]:
    """A model that raises in these calls, its layers done."""
    calls = itertools.count()

    class Failing(Wrapped):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(input_ids, positions, attend, rows=rows)
            if next(calls) in at:
                raise Broken("the model fails")
            return hidden

    return Failing


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_and_failed_steps_lose_nothing(preemption: str, depth: int) -> None:
    """A pool that runs dry while prompts are computed in pieces, and steps that fail: no position is missing and none there twice."""
    rig = TensorRig(
        make_kv("paged-4", 68, host=200), scheduler=Pieces, preemption=preemption, depth=depth, wrap=failing({1, 4, 6, 11, 17, 30})
    )
    requests = add_all(rig)
    assert rig.finish(failure=Broken) == 6
    assert any(request.num_preemptions for request in requests if request.params.prompt_logprobs is not None)
    for request in requests:
        check(rig, request)


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_accepted_drafts_are_scored(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So many as are accepted and the one after them, each by the row of logits before it."""
    results: list[StepResult] = []
    result = TorchHandle.result
    monkeypatch.setattr(TorchHandle, "result", lambda self: (results.append(result(self)), results[-1])[1])
    answers: dict[tuple[int, ...], list[int]] = {}

    def propose(sequence: Sequence) -> list[int]:
        at = len(sequence.output)
        return [token + (i >= at % 4) & 255 for i, token in enumerate(answers[sequence.request.prompt][at : at + 3])]

    rig = TensorRig(make_kv("paged-4", 400), proposer=propose)
    requests = [rig.add(prompt, 15, logprobs=i, prompt_logprobs=1, **params) for i, prompt in enumerate(PROMPTS[:4])]
    answers.update({request.prompt: rig.expected(request)[0] for request in requests})
    rig.finish()
    assert any(chunk.drafts and chunk.logits_from < chunk.sampled_from for plan in rig.plans for chunk in plan.chunks)
    assert len(rig.plans) < 15
    assert all(len(scored) == len(step.tokens[index]) for step in results for index, scored in step.logprobs.items())
    for request in requests:
        check(rig, request)


def test_they_are_the_models_own() -> None:
    """Before bans and temperature: a token that may not come yet keeps its log probability and its rank before the one that came
    (known fault 55)."""
    free = TensorRig(make_kv("paged-4", 256))
    unbound = free.add(PROMPTS[2], 3)
    free.finish()
    best = free.tokens(unbound)[0][0]
    rig = TensorRig(make_kv("paged-4", 256))
    request = rig.add(PROMPTS[2], 2, stop_token_ids=[best], min_tokens=2, logprobs=2)
    hot = rig.add(PROMPTS[3], 5, logprobs=2, temperature=3.0, seed=1)
    rig.finish()
    logits = reference_logits(rig.folder, (*PROMPTS[2], *request.finished[0].output))[len(PROMPTS[2]) - 1 : -1]
    check_entries(request.finished[0].logprobs, logits, request.finished[0].output, 2)
    first = request.finished[0].logprobs[0]
    assert first.rank == 2 and first.top[0][0] == best
    check(rig, hot)


def test_best_of_gives_the_likeliest_samples() -> None:
    """The n whose log probabilities have the greatest sums, the best first; no log probabilities of tokens that nobody asked for."""
    rig = TensorRig(make_kv("paged-4", 400))
    request = rig.add(PROMPTS[2], 6, n=2, best_of=6, temperature=2.0, seed=5)
    rig.finish()
    samples = rig.expected(request)
    sums = []
    for output in samples:
        logprobs = reference_logits(rig.folder, (*request.prompt, *output))[len(request.prompt) - 1 : -1].log_softmax(-1)
        sums.append(float(logprobs.gather(1, torch.tensor(output)[:, None]).sum()))
    order = sorted(range(6), key=lambda index: -sums[index])
    assert order[:2] != [0, 1] and len({tuple(sample) for sample in samples}) == 6
    outputs = rig.answers[request.id].outputs
    assert [output.token_ids for output in outputs] == [samples[index] for index in order[:2]]
    assert [output.cumulative_logprob for output in outputs] == pytest.approx([sums[index] for index in order[:2]], abs=1e-3)
    assert all(output.logprobs is None for output in outputs)


def test_prompts_go_through_the_head_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: the layers run once a step, the head over at most MAX_ROWS rows of prompts at a time (known fault 54)."""
    monkeypatch.setattr(scoring, "MAX_ROWS", 5)
    rows: list[int] = []
    forwards: list[int] = []

    class Spy(Wrapped):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
            forwards.append(len(input_ids))
            return super().forward(input_ids, positions, attend, rows=rows)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden))
            return super().logits(hidden)

    rig = TensorRig(make_kv("paged-4", 256), wrap=Spy)
    requests = [rig.add(PROMPTS[5], 2, prompt_logprobs=1), rig.add(PROMPTS[2], 2, prompt_logprobs=1)]
    rig.finish()
    assert forwards == [44, 2]
    assert rows == [5] * 8 + [2]  # 32 + 10 rows of prompts; what is drawn is an argmax
    for request in requests:
        check(rig, request)


@pytest.mark.parametrize("depth", [1, 2])
def test_only_the_request_whose_prompt_has_no_finite_logits_fails(depth: int) -> None:
    """Even where nothing is drawn yet; its neighbour goes on to its end."""

    class Poisoned(Wrapped):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            out = super().logits(hidden)
            out[7:8] = torch.nan
            return out

    rig = TensorRig(make_kv("paged-4", 256), wrap=Poisoned, depth=depth)
    first, second = rig.add(PROMPTS[1], 4, prompt_logprobs=0), rig.add(PROMPTS[2], 4, prompt_logprobs=0)  # rows 0 to 3, rows 4 to 13
    rig.finish()
    check(rig, first)
    [output] = rig.answers[second.id].outputs
    assert (output.finish_reason, output.error) == (
        "error",
        "the model gave no finite logits: its weights or this request's KV hold NaN or infinity",
    )


def test_the_judge_of_these_tests_can_say_no() -> None:
    """One position later, one id, one rank, a thousandth: each is noticed."""
    rig = TensorRig(make_kv("paged-4", 256))
    request = rig.add(PROMPTS[2], 3, prompt_logprobs=2)
    rig.finish()
    right, logits = request.prompt_logprobs, reference_logits(rig.folder, request.prompt)[:-1]
    first = right[0]

    def refused(entries: Seq[TokenLogprobs], rows: torch.Tensor = logits) -> bool:
        try:
            check_entries(entries, rows, request.prompt[1:], 2)
        except AssertionError:
            return True
        return False

    assert not refused(right)
    assert refused(right[:-1]) and refused(right, logits.roll(1, 0))
    for wrong in (
        first._replace(token_id=first.token_id + 1),
        first._replace(logprob=first.logprob + 1e-3),
        first._replace(logprob=math.nan),
        first._replace(rank=first.rank + 1),
        first._replace(top=first.top[::-1]),
        first._replace(top=first.top[:1]),
    ):
        assert refused([wrong, *right[1:]])

"""What a request becomes: how much of its prompt counts, whose priority counts, how long it may be, and what `best_of` refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.fake_model import decode_alone, sample_alone, score_alone
from octavo.core.testing.rig import Rig

NewRig = Callable[..., Rig]
PROMPT = [1 + number % 4 for number in range(20)]


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(None, 4, 20), (7, 4, 7), (1, 4, 1), (20, 4, 20), (500, 4, 20), (-1, 4, 20), (-1, 25, 15), (-1, 39, 1), (-1, None, 20)],
)
def test_truncated_prompts_keep_their_end(new_rig: NewRig, keep: int | None, max_tokens: int | None, kept: int) -> None:
    """The last tokens, at most as many as there are; -1: what the context of 40 leaves beside max_tokens."""
    rig = new_rig()
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=keep)
    request = rig.engine.add_request(PROMPT, params)
    assert list(request.prompt) == PROMPT[20 - kept :]
    assert request.max_tokens == (40 - kept if max_tokens is None else max_tokens)
    rig.finish()
    assert rig.answers(request) == decode_alone(request)
    assert rig.outputs[request.id][-1].prompt_token_ids == PROMPT[20 - kept :]


def test_a_long_prompt_is_served_only_if_it_may_be_cut(new_rig: NewRig) -> None:
    """Never cut in silence (fault 23); -1 leaves one token where max_tokens alone fills the context."""
    rig, prompt = new_rig(), PROMPT * 3
    with pytest.raises(RequestError, match="60") as refusal:
        rig.engine.add_request(prompt, SamplingParams(max_tokens=4))
    assert refusal.value.field in ("prompt", "max_tokens")
    assert len(rig.engine.add_request(prompt, SamplingParams(max_tokens=4, truncate_prompt_tokens=-1)).prompt) == 36
    with pytest.raises(RequestError, match="max_tokens 40"):
        rig.engine.add_request(prompt, SamplingParams(max_tokens=40, truncate_prompt_tokens=-1))


def test_an_empty_prompt_stays_empty(new_rig: NewRig) -> None:
    """And is refused as such."""
    with pytest.raises(RequestError, match="empty"):
        new_rig().engine.add_request([], SamplingParams(truncate_prompt_tokens=3))


@pytest.mark.parametrize("given", [0, -2, 1.5, True, "3"])
def test_what_is_no_length_to_truncate_to(given: Any) -> None:
    """Refused by the parameter's name."""
    with pytest.raises(RequestError, match="truncate_prompt_tokens") as refusal:
        SamplingParams(truncate_prompt_tokens=given)
    assert refusal.value.field == "truncate_prompt_tokens"


def test_the_calls_priority_counts_more_than_the_params(new_rig: NewRig) -> None:
    """Params order requests that the call says nothing of; 0 said by the call is a word too."""
    rig = new_rig(max_num_seqs=1, order="priority", ageing=100.0)
    late, soon = rig.add(priority=None, n=1), rig.engine.add_request(PROMPT[:4], SamplingParams(max_tokens=4, priority=-1))
    never_said = rig.engine.add_request(PROMPT[:4], SamplingParams(max_tokens=4, priority=-2), priority=0)
    assert (late.priority, soon.priority, never_said.priority) == (0, -1, 0)
    rig.finish()
    assert list(rig.outputs) == [soon.id, late.id, never_said.id]


def test_best_of_gives_the_best_n(new_rig: NewRig) -> None:
    """Four are sampled, the two with the highest cumulative log probability come out, best first, numbered anew."""
    rig = new_rig()
    request = rig.add(4, 6, n=2, best_of=4, seed=3, ignore_eos=False)
    rig.finish()
    samples = [sample_alone(request, index) for index in range(4)]
    scores = [sum(entry.logprob for entry in score_alone(request, tokens, 0)) for tokens, _ in samples]
    best = sorted(range(4), key=lambda index: (-scores[index], index))[:2]
    answer = rig.outputs[request.id][-1]
    assert [(output.token_ids, output.finish_reason) for output in answer.outputs] == [samples[index] for index in best]
    assert [output.index for output in answer.outputs] == [0, 1]
    assert [output.cumulative_logprob for output in answer.outputs] == [scores[index] for index in best]


@pytest.mark.parametrize(
    ("given", "words", "field"),
    [
        ({"best_of": 0}, "best_of = 0: must be a whole number from n to 64", "best_of"),
        ({"best_of": 65}, "best_of = 65: must be a whole number from n to 64", "best_of"),
        ({"best_of": 2.0}, "best_of = 2.0", "best_of"),
        ({"n": 3, "best_of": 2}, "best_of = 2: must be at least n, which is 3", "best_of"),
        ({"best_of": 2, "temperature": 0.0}, "best_of = 2 with temperature = 0.0: greedy sampling gives 2 equal outputs", "best_of"),
    ],
)
def test_what_best_of_refuses(given: dict[str, Any], words: str, field: str) -> None:
    """By itself, beside n, and with greedy sampling."""
    with pytest.raises(RequestError, match=words.replace(".", r"\.")) as refusal:
        SamplingParams(**given)
    assert refusal.value.field == field


def test_best_of_cannot_be_streamed_and_takes_its_seats(new_rig: NewRig) -> None:
    """Which samples are the best is known at the end; all of them need a seat; with nothing to choose from it may be streamed."""
    rig = new_rig(max_num_seqs=3)
    with pytest.raises(RequestError, match="cannot be streamed") as refusal:
        rig.add(n=1, best_of=2, stream=True)
    assert refusal.value.field == "best_of"
    with pytest.raises(RequestError, match="needs 4 seats"):
        rig.add(n=1, best_of=4)
    request = rig.add(n=2, best_of=2, stream=True)
    rig.finish()
    assert rig.outputs[request.id][-1].finished

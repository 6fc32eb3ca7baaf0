"""A request whose time is up ends with what it has, its slots come back, and the others go on; nothing is kept of those that ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.deadlines import SLACK, Deadlines
from octavo.core.errors import RequestError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.fake_model import decode_alone, sample_alone
from octavo.core.testing.rig import Rig

NewRig = Callable[..., Rig]


def begun(request: Request, rig: Rig) -> list[tuple[list[int], str | None]]:
    """The answer of a request that timed out, checked to be the beginning of what it would have given."""
    found = rig.answers(request)
    for index, (tokens, reason) in enumerate(found):
        assert reason == "timeout"
        assert tokens == sample_alone(request, index)[0][: len(tokens)]
    return found


def test_while_it_runs(policy: Any) -> None:
    """It keeps the tokens that it has (a step takes a second), and the others' are those of unbatched decoding."""
    rig = policy.rig()
    timed, other = rig.add(4, 20, timeout_s=12.5), rig.add(5, 20)
    rig.finish()
    (tokens, _), *_ = begun(timed, rig)
    assert 2 <= len(tokens) < 20
    assert rig.answers(other) == decode_alone(other)
    assert rig.outputs[timed.id][-1].times.finished == 13.0


def test_while_it_waits(policy: Any) -> None:
    """For a seat, say: no tokens, and it was never admitted."""
    rig = policy.rig(max_num_seqs=1)
    first, timed, last = rig.add(4, 12), rig.add(4, 4, timeout_s=2.0), rig.add(4, 4)
    rig.finish()
    assert begun(timed, rig) == [([], "timeout")]
    assert timed.first_scheduled is None
    assert [rig.answers(request) for request in (first, last)] == [decode_alone(first), decode_alone(last)]


def test_within_the_batching_window(stacks: Any) -> None:
    """The engine says to wake up at the deadline, not at the window's end, and it ends there; others start with the window."""
    rig = stacks.policies["static-window"].rig(window_s=5.0)
    timed, other = rig.add(4, 4, timeout_s=2.5), rig.add(4, 4)
    rig.step()
    assert rig.engine.wait_until == 2.5
    rig.finish()
    assert begun(timed, rig) == [([], "timeout")]
    assert rig.outputs[timed.id][-1].times.finished == 2.5
    assert other.first_scheduled == 5.0 and rig.answers(other) == decode_alone(other)


def test_a_window_does_not_wake_for_those_who_ended(stacks: Any) -> None:
    """An aborted request's deadline is nobody's business."""
    rig = stacks.policies["static-window"].rig(window_s=5.0)
    timed, other = rig.add(4, 4, timeout_s=2.5), rig.add(4, 4)
    rig.engine.abort(timed.id)
    rig.step()
    assert rig.engine.wait_until == 5.0
    rig.finish()
    assert rig.answers(timed) == [([], "abort")] and rig.answers(other) == decode_alone(other)


def test_streamed_pieces_join_to_what_it_had(new_rig: NewRig) -> None:
    """The last piece says why and carries no token."""
    rig = new_rig()
    timed = rig.add(4, 30, timeout_s=6.0, stream=True)
    rig.finish()
    pieces = [piece for output in rig.outputs[timed.id] for piece in output.outputs]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["timeout"]
    assert pieces[-1].token_ids == []
    assert [token for piece in pieces for token in piece.token_ids] == sample_alone(timed, 0)[0][: len(pieces) - 1]
    assert [output.finished for output in rig.outputs[timed.id]] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("timeout_s", [0.5, 6.0], ids=["before the fork", "after it"])
@pytest.mark.parametrize("stream", [False, True])
def test_all_of_n_samples_end(new_rig: NewRig, timeout_s: float, stream: bool) -> None:
    """Three outputs with a reason each, also where the prompt had not been run; one that ended by itself keeps its own (fault 41)."""
    rig = new_rig(max_num_seqs=3)
    blocker = rig.add(4, 3) if timeout_s < 1 else None
    timed = rig.add(4, 30, n=3, timeout_s=timeout_s, stream=stream, ignore_eos=False, seed=4)
    rig.finish()
    pieces = [piece for output in rig.outputs[timed.id] for piece in output.outputs]
    reasons = {index: [piece.finish_reason for piece in pieces if piece.index == index and piece.finish_reason] for index in range(3)}
    for index in range(3):
        tokens = [token for piece in pieces if piece.index == index for token in piece.token_ids]
        whole, reason = sample_alone(timed, index)
        assert reasons[index] == ([reason] if tokens == whole else ["timeout"])
        assert tokens == whole[: len(tokens)] and (len(tokens) == 0) == (blocker is not None)
    assert ["timeout"] in reasons.values()


def test_beams_end_with_the_best_so_far(new_rig: NewRig) -> None:
    """As many as the width, best first; live ones say why."""
    rig = new_rig()
    timed = rig.add(4, 30, beam_width=3, timeout_s=5.0)
    rig.finish()
    found = rig.outputs[timed.id][-1].outputs
    assert len(found) == 3 and "timeout" in {output.finish_reason for output in found}
    scores = [output.cumulative_logprob for output in found]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_while_it_is_preempted(new_rig: NewRig, preemption: str) -> None:
    """Its tokens from before are its answer; a copy in host memory goes too."""
    rig = new_rig(slots=32, host=64, preemption=preemption)
    first, timed = rig.add(12, 16), rig.add(12, 16, timeout_s=30.0)
    while not timed.num_preemptions:
        rig.step()
    assert not timed.running and (rig.kv.usage().host > 0) == (preemption == "swap")
    had = list(timed.sequences[0].output)
    rig.clock.sleep_until(30.0)
    rig.step()
    assert rig.kv.usage().host == 0
    rig.finish()
    assert begun(timed, rig) == [(had, "timeout")] and had
    assert rig.answers(first) == decode_alone(first)


def test_with_a_step_in_flight(new_rig: NewRig) -> None:
    """What that step sampled is dropped; slots and counts are right."""
    rig = new_rig(depth=2)
    timed, other = rig.add(4, 30, timeout_s=6.0), rig.add(4, 30)
    rig.finish()
    assert 0 < len(begun(timed, rig)[0][0]) < 30
    assert rig.answers(other) == decode_alone(other)


def test_aborted_or_ended_before(new_rig: NewRig) -> None:
    """The deadline comes and nobody is ended twice; the id may be in use again by then."""
    rig = new_rig()
    aborted, ended = rig.add(4, 9, timeout_s=5.0, request_id="a"), rig.add(4, 3, timeout_s=5.0, request_id="b")
    rig.step(2)
    rig.engine.abort("a")
    rig.step(2)
    assert rig.answers(aborted)[0][1] == "abort" and rig.answers(ended) == decode_alone(ended)
    again = rig.add(4, 9, request_id="a")
    rig.finish()
    assert rig.answers(again) == decode_alone(again)


def test_no_deadline_no_entry_and_those_who_ended_are_forgotten(new_rig: NewRig) -> None:
    """An engine that answers with an hour's limit for weeks: its heap holds few more than the live ones."""
    rig = new_rig()
    rig.add(2, 1)
    rig.finish()
    assert len(rig.engine._deadlines) == 0
    for _ in range(3 * SLACK):
        rig.add(2, 1, timeout_s=3600.0)
        rig.finish()
        assert len(rig.engine._deadlines) <= SLACK + 2
    live = rig.add(2, 8, timeout_s=3600.0)
    rig.step()
    assert rig.engine._deadlines.first == live.deadline


def test_the_heap() -> None:
    """Earliest first, equal times in order of arrival, ended ones never."""
    deadlines, params = Deadlines(), SamplingParams()
    times = [5.0, 3.0, None, 3.0, 9.0, 1.0]
    requests = [Request(f"r{i}", (1,), params, max_tokens=1, seed=0, deadline=time, order=i) for i, time in enumerate(times)]
    for request in requests:
        deadlines.add(request)
    deadlines.drop(requests[5])
    assert deadlines.first == 3.0
    assert [request.id for request in deadlines.expired(5.0)] == ["r1", "r3", "r0"]
    assert (deadlines.first, len(deadlines)) == (9.0, 1)
    deadlines.drop(requests[4])
    assert deadlines.first is None and list(deadlines.expired(100.0)) == []


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), "5", True])
def test_what_is_no_time(given: Any) -> None:
    """Refused by the parameter's name."""
    with pytest.raises(RequestError, match="timeout_s") as refusal:
        SamplingParams(timeout_s=given)
    assert refusal.value.field == "timeout_s"

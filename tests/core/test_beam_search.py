"""Beam search: which continuations go on, which end, when it is over, and what becomes of the beams' KV.

That the whole equals transformers is tested on real models in `tests/matrix/test_beam_search.py`; here are the rules one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.beam_search import advance_beams, pick_beams
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.request import Request, Sequence, Status
from octavo.core.testing.fake_model import decode_alone

PROMPT = (1, 2, 3, 1)
EOS = 0


class RecordingKV:
    """Notes the order of calls; holds nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self.calls.append(("fork", parent.id, num_tokens))


def beams(*outputs: list[int], max_tokens: int = 8, **params: Any) -> Request:
    """A search under way, as wide as it has beams, with these outputs, each worth minus its place."""
    asked = BeamSearchParams(**({"beam_width": len(outputs)} | params), max_tokens=max_tokens)
    search = Request("r", PROMPT, asked.sampling, max_tokens=max_tokens, seed=0, stop_ids=frozenset({EOS}), beams=asked)
    search.forked = True
    search.sequences = [Sequence(f"r/{i}", search, output=output, score=-float(i)) for i, output in enumerate(outputs)]
    for beam in search.sequences:
        beam.status, beam.num_computed = Status.OPEN, beam.num_tokens
    return search


def advance(search: Request, rows: list[list[tuple[int, float]]], kv: RecordingKV | None = None) -> bool:
    """One step with these candidates of each beam; dropped beams leave the request."""
    kv = kv or RecordingKV()

    def drop(sequence: Sequence) -> None:
        kv.calls.append(("drop", sequence.id, 0))
        search.sequences.remove(sequence)

    return advance_beams(kv, search, list(zip(search.sequences, rows, strict=True)), drop=drop)  # type: ignore[arg-type]


def test_pick_beams_takes_the_best_and_those_that_ended_before_them() -> None:
    """An ended hypothesis counts only if it ranks before the last live one."""
    search = beams([5], [6])
    first, second = search.sequences
    rows = [(first, [(0, -0.1), (7, -0.5), (8, -9.0)]), (second, [(7, -0.2), (0, -5.0)])]
    live, ended = pick_beams(search, rows)
    assert [(h.output, h.log_prob) for h in live] == [([5, 7], -0.5), ([6, 7], -1.2)]
    assert [(h.output, h.parent) for h in ended] == [([5, 0], first)]


def test_pick_beams_does_not_depend_on_the_order_of_rows() -> None:
    """Ties are broken by tokens (known fault 37)."""
    search = beams([5], [6], [7])
    for beam in search.sequences:
        beam.score = 0.0
    rows = [(beam, [(token, -1.0) for token in (3, 1, 2)]) for beam in search.sequences]
    expected = [h.output for h in pick_beams(search, rows)[0]]
    assert expected == [[5, 1], [5, 2], [5, 3]]
    for seed in range(5):
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert [h.output for h in pick_beams(search, shuffled)[0]] == expected


def test_dropped_beams_are_closed_before_new_ones_fork() -> None:
    """Else a search would need more room than its width."""
    kv, search = RecordingKV(), beams([5], [6], [7])
    assert not advance(search, [[(1, -0.1), (2, -0.2), (3, -0.3)], [(1, -9.0)], [(1, -9.0)]], kv)
    assert kv.calls == [("drop", "r/1", 0), ("drop", "r/2", 0), ("fork", "r/0", 5), ("fork", "r/0", 5)]
    assert [beam.output for beam in search.sequences] == [[5, 1], [5, 2], [5, 3]]
    assert len({beam.id for beam in search.sequences}) == 3


@pytest.mark.parametrize(
    ("candidates", "live", "ended"),
    [
        ([(1, -0.1), (EOS, -0.2), (2, -0.3)], [1, 2], [EOS]),  # second of two: counts
        ([(1, -0.1), (2, -0.2), (EOS, -0.3)], [1, 2], []),  # third: too late
        ([(1, -0.1), (2, -0.2), (3, -0.3)], [1, 2], []),
        ([(EOS, -0.1)], [], [EOS]),  # nothing is left to go on with
    ],
)
def test_what_ends_counts_only_among_the_first(candidates: list[tuple[int, float]], live: list[int], ended: list[int]) -> None:
    """Those behind the first `beam_width` are there only so that enough can go on."""
    search = beams([5], beam_width=2)
    found = pick_beams(search, [(search.sequences[0], candidates)])
    assert [[h.output for h in part] for part in found] == [[[5, token] for token in tokens] for tokens in (live, ended)]


def test_at_max_tokens_the_first_end_whatever_they_end_with() -> None:
    """As many as beams, by summed log probability, EOS or not."""
    search = beams([5, 5], [6, 6], max_tokens=3)
    assert advance(search, [[(1, -0.1), (EOS, -0.2), (2, -0.3)], [(1, -9.0)]])
    assert [(s.output, s.finish_reason) for s in search.finished] == [([5, 5, 1], "length"), ([5, 5, EOS], "stop")]
    assert search.sequences == []


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "next_best", "over"),
    [
        (True, 1.0, -0.1, True),  # two have ended: that is all
        (False, 1.0, -3.9, False),  # worth -3.9 / 2 = -1.95, the worst that ended -2.0 / 1
        (False, 1.0, -4.0, True),  # equal is not better
        ("never", 1.0, -15.9, False),  # at 8 tokens it would be worth -1.9875
        ("never", 1.0, -16.0, True),
        ("never", 0.0, -1.9, False),
        ("never", 0.0, -2.0, True),
        ("never", -1.0, -0.9, False),  # growing longer makes it worse: at 2 tokens it is worth -1.8
        ("never", -1.0, -1.0, True),
    ],
)
def test_when_the_search_is_over(early_stopping: bool | str, length_penalty: float, next_best: float, over: bool) -> None:
    """Once as many have ended as there are beams, and by what the best live one may still become."""
    search = beams([5], [6], early_stopping=early_stopping, length_penalty=length_penalty)
    for beam in search.sequences:
        beam.score = 0.0
    search.finished = [Sequence("a", search, output=[EOS], score=-1.0), Sequence("b", search, output=[EOS], score=-2.0)]
    assert advance(search, [[(1, next_best)], [(1, -99.0)]]) == over


def test_a_search_is_not_over_before_enough_have_ended() -> None:
    """However good the one that has ended is."""
    search = beams([5], [6], early_stopping=True)
    assert not advance(search, [[(EOS, -0.1), (1, -50.0)], [(1, -99.0)]])
    assert [s.output for s in search.finished] == [[5, EOS]]


def test_the_best_that_ended_are_kept() -> None:
    """By summed log probability over length ** penalty, no more than there are beams; the worst makes place."""
    search = beams([5], [6], early_stopping="never")
    search.finished = [Sequence("a", search, output=[EOS], score=-0.1), Sequence("b", search, output=[EOS], score=-30.0)]
    assert not advance(search, [[(EOS, -4.0), (1, -4.1)], [(1, -4.2)]])
    assert [(s.output, s.score) for s in search.finished] == [([EOS], -0.1), ([5, EOS], -4.0)]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_beam_search_at_any_width(width: int, new_rig: Callable[..., Any]) -> None:
    """Parents stay right: the result is that of a search without engine and cache (known fault 37)."""
    rig = new_rig()
    searches = [rig.add(length, 9, beam_width=width, ignore_eos=ignore) for length in (3, 8) for ignore in (False, True)]
    rig.finish()
    for search in searches:
        assert rig.answers(search) == decode_alone(search)
        outputs = rig.outputs[search.id][0].outputs
        scores = [output.score for output in outputs]
        assert len(scores) == width and scores == sorted(scores, reverse=True)
        assert scores == [output.cumulative_logprob / len(output.token_ids) for output in outputs]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
def test_penalties_and_early_stopping_in_the_engine(early_stopping: Any, length_penalty: float, new_rig: Callable[..., Any]) -> None:
    """As the plainest formulation has it, with several ids that end a hypothesis."""
    rig = new_rig()
    settings = {"early_stopping": early_stopping, "length_penalty": length_penalty, "ignore_eos": False}
    searches = [rig.add(length, 12, beam_width=4, stop_token_ids=stop, **settings) for length in (3, 8) for stop in ([], [2])]
    rig.finish()
    assert [rig.answers(search) for search in searches] == [decode_alone(search) for search in searches]


def test_rows_without_result_end_the_whole_search(new_rig: Callable[..., Any]) -> None:
    """One beam of a step gave no finite logits: its search fails, also if others of its beams came first; the rest goes on."""
    rig = new_rig()
    search, other = rig.add(4, 6, beam_width=3), rig.add(5, 6)
    rig.step(2)
    run = rig.runner._run

    def broken(handle: Any) -> Any:
        result = run(handle)
        result.errors[1] = "no finite logits"
        return result

    rig.runner._run = broken
    rig.step()
    rig.runner._run = run
    rig.finish()
    assert {output.finish_reason for output in rig.outputs[search.id][0].outputs} == {"error"}
    assert rig.answers(other) == decode_alone(other)


def test_a_search_that_is_aborted_gives_what_it_has(new_rig: Callable[..., Any]) -> None:
    """The best of what ended and what was live, each with its own reason; before the first token one empty output."""
    rig = new_rig()
    search, early = rig.add(4, 12, beam_width=3, ignore_eos=False, stop_token_ids=[1]), rig.add(4, 12, beam_width=3)
    rig.engine.abort(early.id)
    while not search.finished:
        rig.step()
    kept = {tuple(sequence.output) for sequence in search.finished}
    rig.engine.abort(search.id)
    rig.finish()
    assert rig.answers(early) == [([], "abort")]
    outputs = rig.outputs[search.id][0].outputs
    assert len(outputs) == 3 and {output.finish_reason for output in outputs} == {"stop", "abort"}
    assert {tuple(output.token_ids) for output in outputs if output.finish_reason == "stop"} <= kept
    assert [output.score for output in outputs] == sorted((output.score for output in outputs), reverse=True)

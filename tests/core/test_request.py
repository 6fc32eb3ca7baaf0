"""Requests and sequences: progress by counts, without a prefill or decode phase."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.request import Request, Sequence, Status
from octavo.core.sampling_params import SamplingParams


def request(prompt_len: int = 4, max_tokens: int = 3, *, n: int = 1, beam_width: int = 0) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(
        "r",
        tuple(range(1, prompt_len + 1)),
        params,
        max_tokens=max_tokens,
        seed=0,
        beams=BeamSearchParams(beam_width) if beam_width else None,
    )


def sequence(*, prompt_len: int = 4, max_tokens: int = 3, output: int = 0, scheduled: int = 0) -> Sequence:
    (lead,) = request(prompt_len, max_tokens).sequences
    lead.output = list(range(100, 100 + output))
    lead.num_scheduled = scheduled
    return lead


@pytest.mark.parametrize(
    ("state", "num_next"),
    [
        ({}, 4),  # the whole prompt
        ({"scheduled": 3}, 1),  # the rest of a prompt that was cut, or was cached
        ({"scheduled": 4}, 1),  # in flight: the token to be sampled is a placeholder
        ({"output": 1, "scheduled": 4}, 1),  # decode
        ({"output": 2, "scheduled": 0}, 6),  # preempted: prompt and outputs again
        ({"output": 2, "scheduled": 6}, 0),  # the last token's KV is never written
        ({"max_tokens": 1, "scheduled": 4}, 0),
    ],
)
def test_num_next(state: dict[str, Any], num_next: int) -> None:
    """Prefill, a piece of it, decode and resumption are one formula."""
    assert sequence(**state).num_next == num_next


def test_kv_of_the_last_token_is_not_written() -> None:
    """30 generated after a prompt of P need P + 29 slots."""
    assert sequence(prompt_len=10, max_tokens=30).max_positions == 10 + 29


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, 6), (4, 7), (5, 6), (7, 7), (0, None), (3, None)])
def test_tokens_are_those_of_prompt_and_output(start: int, stop: int | None) -> None:
    """Any slice is that of the joined list."""
    row = sequence(max_tokens=9, output=3)
    assert row.tokens(start, stop) == [1, 2, 3, 4, 100, 101, 102][start:stop]


def test_new_epoch_forgets_progress_and_keeps_output() -> None:
    """Whatever is in flight is void; the tokens stay."""
    row = sequence(output=2, scheduled=5)
    row.num_computed = 4
    row.new_epoch(Status.NEW)
    assert (row.epoch, row.num_computed, row.num_scheduled, row.awaited, row.status) == (1, 0, 0, None, Status.NEW)
    assert row.output == [100, 101]


def test_seats_are_the_rows_still_needed() -> None:
    """n samples need n seats until the prompt has forked, then as many as live; beams always their width."""
    samples = request(n=3)
    assert samples.seats == 3
    samples.forked = True
    assert samples.seats == 1
    beams = request(beam_width=4)
    beams.forked = True
    assert beams.seats == 4


def test_only_the_first_runs_while_a_family_recovers() -> None:
    """After a preemption the others have nothing computed and wait for their fork."""
    family = request(n=2)
    family.sequences.append(Sequence("r/1", family, 1))
    assert family.runnable == family.sequences
    family.restore = 4
    assert family.runnable == family.sequences[:1]


def test_prefilling_means_more_than_one_token() -> None:
    """Derived from counts, for policies that look at it."""
    one = request()
    assert one.prefilling
    one.sequences[0].num_scheduled = 4
    assert not one.prefilling

"""Log probabilities as users read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict

from octavo.core.logprobs import LEAST, Logprob, TokenLogprobs, readable
from octavo.core.request import Sequence
from octavo.core.testing.fake_model import sample_alone, score_alone
from octavo.core.testing.rig import Rig
from octavo.plugins.schedulers.continuous import CONTINUOUS


def test_the_token_comes_first_then_the_likeliest() -> None:
    """One that is among them is there once, with its rank."""
    entry = TokenLogprobs(7, -2.5, 4, ((3, -0.5), (9, -1.0)))
    assert list(readable(entry, None).items()) == [(7, Logprob(-2.5, 4, None)), (3, Logprob(-0.5, 1, None)), (9, Logprob(-1.0, 2, None))]
    entry = TokenLogprobs(9, -1.0, 2, ((3, -0.5), (9, -1.0)))
    assert list(readable(entry, "<{}>".format)) == [9, 3]
    assert readable(entry, "<{}>".format)[9] == Logprob(-1.0, 2, "<9>")


def test_json_can_say_it() -> None:
    """Minus infinity, which a runner of somebody else's may give, becomes LEAST (known fault 56)."""
    found = readable(TokenLogprobs(1, -math.inf, 5, ((2, 0.0), (1, -math.inf))), None)
    assert json.loads(json.dumps({token: asdict(entry) for token, entry in found.items()}, allow_nan=False))["1"]["logprob"] == LEAST


def test_what_is_cut_behind_a_stop_id_is_not_scored(new_rig: Callable[..., Rig]) -> None:
    """Three drafts are right and a fourth token follows, and the first of them is a stop id: the rest is gone with its scores."""
    rig = new_rig(CONTINUOUS)
    free = rig.add(6, 12, seed=3, request_id="free")
    whole, _ = sample_alone(free, 0)  # each step gives four of these
    at = next(i for i, token in enumerate(whole) if i % 4 == 0 and token not in whole[:i])

    def propose(sequence: Sequence) -> list[int]:
        return whole[len(sequence.output) :][:3]

    rig.scheduler.proposer = propose
    request = rig.add(6, 12, seed=3, stop_token_ids=[whole[at]], logprobs=1)
    rig.finish()
    assert any(len(chunk.drafts) == 3 for plan in rig.plans for chunk in plan.chunks if chunk.sequence.request is request)
    [sequence] = request.finished
    assert sequence.output == whole[: at + 1]
    assert sequence.logprobs == score_alone(request, sequence.output, 1)
    assert sequence.score == sum(entry.logprob for entry in sequence.logprobs)

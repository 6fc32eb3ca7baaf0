"""Log probabilities as users read them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from octavo.core.logprobs import LEAST, Logprob, TokenLogprobs, readable


def test_the_token_comes_first_then_the_likeliest() -> None:
    """One that is among them is there once, with its rank."""
    entry = TokenLogprobs(7, -2.5, 4, ((3, -0.5), (9, -1.0)))
    assert list(readable(entry, None).items()) == [(7, Logprob(-2.5, 4, None)), (3, Logprob(-0.5, 1, None)), (9, Logprob(-1.0, 2, None))]
    entry = TokenLogprobs(9, -1.0, 2, ((3, -0.5), (9, -1.0)))
    assert list(readable(entry, "<{}>".format)) == [9, 3]
    assert readable(entry, "<{}>".format)[9] == Logprob(-1.0, 2, "<9>")


def test_json_can_say_it() -> None:
    """Minus infinity, which a runner of somebody else's may give, becomes LEAST."""
    found = readable(TokenLogprobs(1, -math.inf, 5, ((2, 0.0), (1, -math.inf))), None)
    assert json.loads(json.dumps({token: asdict(entry) for token, entry in found.items()}, allow_nan=False))["1"]["logprob"] == LEAST

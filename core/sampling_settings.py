"""What a request's parameters alone say of how its tokens are drawn: worked out once, when it is submitted.

Must not know: torch, sequences, plans, logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.core.arrays import Floats, Ints

_LAST_OF_64_BITS = 2**64 - 1


class Numbers(NamedTuple):
    """Plain numbers of a row; what is off has its neutral value."""

    temperature: float  # 0: greedy
    top_k: float  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    repetition: float  # 1: off
    frequency: float  # 0: off
    presence: float  # 0: off


class Processor(NamedTuple):
    """A user's function, and whether it wants the prompt's ids before the output's."""

    function: Callable[..., Any]
    takes_prompt: bool

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Any) -> Any:
        """It gets lists of its own: what it does to them is nobody else's business."""
        return self.function(list(prompt), list(output), logits) if self.takes_prompt else self.function(list(output), logits)


class BadWord(NamedTuple):
    """A text of several tokens: where an output ends with `beginning`, `last` may not follow."""

    beginning: list[int]
    last: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSettings:
    """Of all rows of one request. Arrays are not to be written."""

    numbers: Numbers
    seed: int  # in 64 bits without a sign
    min_tokens: int = 0
    stop_ids: Ints  # not drawn before min_tokens
    allowed: Ints  # if there are any, no other token is drawn
    banned: Ints  # never drawn
    bad_words: tuple[BadWord, ...] = ()
    bias_ids: Ints
    bias: Floats
    processors: tuple[Processor, ...] = ()
    penalised: bool  # token counts are wanted
    repeats: bool  # with the prompt's tokens among them
    special: bool  # something changes the logits, perhaps

    @classmethod
    def of(
        cls, params: SamplingParams, *, seed: int, stop_ids: Collection[int] = (), bad_words: Sequence[Sequence[int]] = ()
    ) -> RowSettings:
        """`bad_words`: the ids of `params.bad_words`. Raises RequestError: a logits processor takes other arguments than it would get."""
        import numpy as np  # here, since schedulers' descriptors import requests

        banned = {word[0] for word in bad_words if len(word) == 1}
        longer = tuple(BadWord(list(word[:-1]), word[-1]) for word in bad_words if len(word) > 1)
        return cls(
            numbers=Numbers(
                temperature=0.0 if params.greedy else params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            ),
            seed=seed & _LAST_OF_64_BITS,
            min_tokens=params.min_tokens,
            stop_ids=_ids(stop_ids),
            allowed=_ids(params.allowed_token_ids),
            banned=_ids(banned),
            bad_words=longer,
            bias_ids=np.array([token for token, _ in params.logit_bias], dtype=np.int64),
            bias=np.array([bias for _, bias in params.logit_bias], dtype=np.float64),
            processors=tuple(_processor(function, index) for index, function in enumerate(params.logits_processors)),
            penalised=params.penalised,
            repeats=params.repetition_penalty != 1.0,
            special=bool(
                params.penalised
                or params.logit_bias
                or params.allowed_token_ids
                or bad_words
                or params.logits_processors
                or (params.min_tokens and stop_ids)
            ),
        )


def _ids(token_ids: Collection[int]) -> Ints:
    import numpy as np

    return np.array(sorted(set(token_ids)), dtype=np.int64)


def _processor(function: Callable[..., Any], index: int) -> Processor:
    """Told apart by how many arguments can be given in their places."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return Processor(function, takes_prompt=False)
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = 3 if sum(parameter.kind in places for parameter in signature.parameters.values()) == 3 else 2
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        raise RequestError(
            f"logits_processors[{index}] takes {signature}: must take (output ids, logits) or (prompt ids, output ids, logits)",
            field="logits_processors",
        ) from error
    return Processor(function, takes_prompt=arguments == 3)

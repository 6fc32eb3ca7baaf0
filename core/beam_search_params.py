"""What one request asks of beam search: how many beams, for how long, and what makes one hypothesis better than another.

Names and meanings are those of transformers' `generate(num_beams=...)`. As with `SamplingParams`, every field says what it allows.
Must not know: torch, the tokenizer, the model, the search itself.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from octavo.core.parameters import STRICT, Length, TokenId, list_as_tuple, refuse, spec
from octavo.core.sampling_params import SamplingParams

MAX_BEAM_WIDTH = 16


@dataclass(frozen=True, slots=True, config=STRICT)
class BeamSearchParams:
    """Frozen, hashable, picklable; `dataclasses.replace` makes a changed copy and checks it again.

    Raises RequestError, its `field` the name of the parameter to blame.
    """

    beam_width: Annotated[
        int,
        spec(
            "Beams that are followed, and outputs that are returned, the best first; with 1 it is greedy search.",
            f"a whole number from 1 to {MAX_BEAM_WIDTH}",
            ge=1,
            le=MAX_BEAM_WIDTH,
        ),
    ]
    max_tokens: Annotated[
        Length | None, spec("Most tokens of one output; None: the rest of the context.", "a whole number, 1 or above, or None")
    ] = 16
    length_penalty: Annotated[
        float,
        spec(
            "A hypothesis is worth its summed log probability divided by its length to this power: above 0 favours long ones, "
            "below 0 short ones.",
            "a number from -20 to 20",
            ge=-20,
            le=20,
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        spec(
            "When the search ends before max_tokens, once beam_width hypotheses have ended. True: at once; False: when the best beam, at "
            'its present length, is worth no more than the worst of them; "never": when it cannot become so at any length.',
            'True, False or "never"',
        ),
    ] = False
    ignore_eos: Annotated[bool, spec("Go on after an EOS token.", "True or False")] = False
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        BeforeValidator(list_as_tuple),
        spec("Token ids that end a hypothesis, besides the model's EOS ids.", "a list of token ids of the model's vocabulary"),
    ] = ()
    timeout_s: Annotated[
        Annotated[float, Field(gt=0)] | None,
        spec(
            "Seconds after which the search ends with what it has, the finish reason of live beams timeout; None: never.",
            "a number above 0, or None",
        ),
    ] = None
    cache_salt: Annotated[str, spec("Cached prefixes are shared only among prompts of equal salt.", "a string")] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler: ModelWrapValidatorHandler[BeamSearchParams]) -> BeamSearchParams:
        try:
            return handler(data)
        except ValidationError as error:
            refuse(error.errors(include_url=False)[0], FIELDS, kind="beam search")

    @property
    def sampling(self) -> SamplingParams:
        """The same for whoever only asks how a sequence goes on and when it ends: one output, nothing drawn.

        Where nothing ends a hypothesis its length is known, as some reservations of KV must know it.
        """
        endless = self.ignore_eos and not self.stop_token_ids
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            timeout_s=self.timeout_s,
            cache_salt=self.cache_salt,
            known_output_len=self.max_tokens if endless else None,
        )

    def score(self, log_prob: float, length: int) -> float:
        """What a hypothesis of `length` tokens and that summed log probability is worth."""
        return log_prob / math.pow(max(length, 1), self.length_penalty)


# In the order of declaration, which is that of positional arguments.
FIELDS: dict[str, FieldInfo] = vars(BeamSearchParams)["__pydantic_fields__"]

"""What one request asks of sampling: how tokens are chosen, and when to stop.

Names, defaults and meanings are those of vLLM's `SamplingParams` and OpenAI's API. Every field carries a description and what
it allows, in words; the reference and the JSON schema are made from them, and a refusal quotes them.

Must not know: torch, the tokenizer, the model (`validate_for` gets the one number it needs).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from octavo.core.errors import RequestError

GREEDY_BELOW = 1e-5  # so small a temperature would only turn logits into inf: the likeliest token wins long before
LARGEST = 2**31 - 1  # every count and id fits an int32 tensor
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256  # characters; the two bounds keep the search after each token cheap, whatever a client sends


def _spec(description: str, allowed: str, **bounds: Any) -> Any:
    """A field's documentation and bounds. `allowed` says in words what `bounds` and the type check."""
    return Field(description=description, json_schema_extra={"allowed": allowed}, **bounds)


def _list_as_tuple(value: object) -> object:
    """JSON has lists, a hashable object needs tuples; whatever else it may be is left for the type check to refuse."""
    return tuple(value) if isinstance(value, list) else value


def _stop_as_tuple(value: object) -> object:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else _list_as_tuple(value)


def _minus_one_as_zero(value: object) -> object:
    return 0 if type(value) is int and value == -1 else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Length = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class SamplingParams:
    """Frozen, hashable, picklable; `dataclasses.replace` makes a changed copy and checks it again.

    Raises RequestError, its `field` the name of the parameter to blame.
    """

    n: Annotated[int, _spec("Outputs to sample from the one prompt.", "a whole number from 1 to 64", ge=1, le=64)] = 1
    temperature: Annotated[
        float,
        _spec(
            f"Divides the logits; below {GREEDY_BELOW} the likeliest token is taken (greedy).", "a number from 0 to 1,000,000", ge=0, le=1e6
        ),
    ] = 1.0
    top_p: Annotated[
        float, _spec("Keep the likeliest tokens that together have this probability; 1: off.", "a number above 0, at most 1", gt=0, le=1)
    ] = 1.0
    top_k: Annotated[
        Count, BeforeValidator(_minus_one_as_zero), _spec("Keep the k likeliest tokens; 0 or -1: off.", "a whole number, -1 or above")
    ] = 0
    min_p: Annotated[
        float, _spec("Drop tokens less probable than this fraction of the likeliest one's; 0: off.", "a number from 0 to 1", ge=0, le=1)
    ] = 0.0
    seed: Annotated[
        Seed | None, _spec("Makes this request's samples repeatable; None: the engine picks one.", "a whole number of 64 bits, or None")
    ] = None
    stop: Annotated[
        tuple[StopString, ...],
        BeforeValidator(_stop_as_tuple),
        _spec(
            "Strings that end the output; the text is cut where the first one to be completed begins.",
            f"a string or a list of up to {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_LENGTH} characters",
            max_length=MAX_STOP_STRINGS,
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        BeforeValidator(_list_as_tuple),
        _spec("Token ids that end the output, besides the model's EOS ids.", "a list of token ids of the model's vocabulary"),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, _spec("Keep the stop string, or the stop token's text, in the output.", "True or False")
    ] = False
    ignore_eos: Annotated[bool, _spec("Go on after an EOS token.", "True or False")] = False
    max_tokens: Annotated[
        Length | None, _spec("Most tokens of one output; None: the rest of the context.", "a whole number, 1 or above, or None")
    ] = 16
    min_tokens: Annotated[
        Count,
        _spec("Tokens that come before a stop token or stop string may end the output.", "a whole number from 0 to max_tokens"),
    ] = 0
    cache_salt: Annotated[str, _spec("Cached prefixes are shared only among prompts of equal salt.", "a string")] = ""
    known_output_len: Annotated[
        Length | None,
        _spec(
            "The output's length, known beforehand where recorded traffic is replayed; needs ignore_eos.",
            "a whole number from 1 to max_tokens, or None",
        ),
    ] = None
    skip_special_tokens: Annotated[bool, _spec("Leave special tokens out of the output text.", "True or False")] = True

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler: ModelWrapValidatorHandler[SamplingParams]) -> SamplingParams:
        try:
            params = handler(data)
        except ValidationError as error:
            _refuse(error.errors(include_url=False)[0])
        params._check_together()
        return params

    def _check_together(self) -> None:
        """What no field can check alone."""
        if self.greedy and self.n > 1:
            raise RequestError(
                f"n = {self.n} with temperature = {self.temperature}: greedy sampling gives {self.n} equal outputs; "
                f"ask for n = 1, or a temperature of at least {GREEDY_BELOW}",
                field="n",
            )
        for field in ("min_tokens", "known_output_len"):
            value = getattr(self, field)
            if value is not None and self.max_tokens is not None and value > self.max_tokens:
                raise RequestError(f"{field} = {value}: must be at most max_tokens, which is {self.max_tokens}", field=field)
        if self.known_output_len is not None and not self.ignore_eos:
            raise RequestError(
                f"known_output_len = {self.known_output_len}: an EOS could end the output sooner; set ignore_eos = True as well",
                field="known_output_len",
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW


# In the order of declaration, which is that of positional arguments.
FIELDS: dict[str, FieldInfo] = vars(SamplingParams)["__pydantic_fields__"]


def allowed(field: str) -> str:
    """What a parameter may be, in words: for error messages and the reference."""
    extra = FIELDS[field].json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else ""


def validate_for(params: SamplingParams, *, vocab_size: int) -> None:
    """Check what needs the model: `vocab_size` is the number of logits. Raises RequestError."""
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token_id}: must be below the vocabulary's size, which is {vocab_size}", field="stop_token_ids"
            )


def _refuse(error: ErrorDetails) -> NoReturn:
    """Say pydantic's first complaint in our words: which parameter, what it was, what it may be."""
    first, *inner = error["loc"]
    field = list(FIELDS)[first] if isinstance(first, int) and first < len(FIELDS) else str(first)
    if field not in FIELDS:
        near = get_close_matches(field, FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIELDS)}"
        raise RequestError(f"unknown sampling parameter {field}: {hint}", field=field)
    where = field + "".join(f"[{index}]" for index in inner if isinstance(index, int))
    value = repr(error["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    raise RequestError(f"{where} = {shown}: must be {allowed(field)}", field=field)

"""What one request asks of sampling: how tokens are chosen, and when to stop.

Names, defaults and meanings are those of vLLM's `SamplingParams` and OpenAI's API. Every field carries a description and what
it allows, in words; the reference and the JSON schema are made from them, and a refusal quotes them.

Must not know: torch, the tokenizer, the model (`validate_for` gets the one number it needs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, WithJsonSchema, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from octavo.core.errors import RequestError
from octavo.core.parameters import LARGEST, STRICT, Count, Length, TokenId, allowed, list_as_tuple, refuse, spec
from octavo.core.structured_outputs import StructuredOutputsParams

GREEDY_BELOW = 1e-5  # so small a temperature would only turn logits into inf: the likeliest token wins long before
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256  # characters; the two bounds keep the search after each token cheap, whatever a client sends
MAX_LOGPROBS = 1000  # of one token; each becomes Python objects


def _none_as_empty(value: object) -> object:
    return () if value is None else list_as_tuple(value)


def _stop_as_tuple(value: object) -> object:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else list_as_tuple(value)


def _bias_as_pairs(value: object) -> object:
    """JSON objects have text keys, so "50256" stands for 50256; sorted, since equal params should be equal."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        return list_as_tuple(value)
    pairs = ((int(key) if isinstance(key, str) and key.isdecimal() else key, bias) for key, bias in value.items())
    return tuple(sorted(pairs, key=lambda pair: (not isinstance(pair[0], int), str(pair[0]) if not isinstance(pair[0], int) else pair[0])))


def _structured(value: object) -> object:
    return StructuredOutputsParams(**value) if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) else value


def _minus_one_as_zero(value: object) -> object:
    return 0 if type(value) is int and value == -1 else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitsProcessor = Annotated[Callable[..., Any], WithJsonSchema({"description": "a Python function"})]
"""(output ids, logits [V]) -> logits [V], or with three parameters (prompt ids, output ids, logits); a torch tensor, fp32."""


@dataclass(frozen=True, slots=True, config=STRICT)
class SamplingParams:
    """Frozen, hashable, picklable; `dataclasses.replace` makes a changed copy and checks it again.

    Raises RequestError, its `field` the name of the parameter to blame.
    """

    n: Annotated[int, spec("Outputs to sample from the one prompt.", "a whole number from 1 to 64", ge=1, le=64)] = 1
    temperature: Annotated[
        float,
        spec(
            f"Divides the logits; below {GREEDY_BELOW} the likeliest token is taken (greedy).", "a number from 0 to 1,000,000", ge=0, le=1e6
        ),
    ] = 1.0
    top_p: Annotated[
        float, spec("Keep the likeliest tokens that together have this probability; 1: off.", "a number above 0, at most 1", gt=0, le=1)
    ] = 1.0
    top_k: Annotated[
        Count, BeforeValidator(_minus_one_as_zero), spec("Keep the k likeliest tokens; 0 or -1: off.", "a whole number, -1 or above")
    ] = 0
    min_p: Annotated[
        float, spec("Drop tokens less probable than this fraction of the likeliest one's; 0: off.", "a number from 0 to 1", ge=0, le=1)
    ] = 0.0
    best_of: Annotated[
        Annotated[int, Field(ge=1, le=64)] | None,
        spec(
            "Outputs to sample, of which the n with the highest cumulative logprob are given; None: n.",
            "a whole number from n to 64, or None",
        ),
    ] = None
    presence_penalty: Annotated[
        float, spec("Subtracted from the logit of every token that the output holds.", "a number from -2 to 2", ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        spec("Subtracted from a token's logit for each time that the output holds it.", "a number from -2 to 2", ge=-2, le=2),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        spec(
            "Divides the logit of every token in prompt or output where it is positive, multiplies it where it is negative; 1: off.",
            "a number above 0, at most 100",
            gt=0,
            le=100,
        ),
    ] = 1.0
    seed: Annotated[
        Seed | None, spec("Makes this request's samples repeatable; None: the engine picks one.", "a whole number of 64 bits, or None")
    ] = None
    stop: Annotated[
        tuple[StopString, ...],
        BeforeValidator(_stop_as_tuple),
        spec(
            "Strings that end the output; the text is cut where the first one to be completed begins.",
            f"a string or a list of up to {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_LENGTH} characters",
            max_length=MAX_STOP_STRINGS,
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        BeforeValidator(list_as_tuple),
        spec("Token ids that end the output, besides the model's EOS ids.", "a list of token ids of the model's vocabulary"),
    ] = ()
    include_stop_str_in_output: Annotated[bool, spec("Keep the stop string, or the stop token's text, in the output.", "True or False")] = (
        False
    )
    ignore_eos: Annotated[bool, spec("Go on after an EOS token.", "True or False")] = False
    max_tokens: Annotated[
        Length | None, spec("Most tokens of one output; None: the rest of the context.", "a whole number, 1 or above, or None")
    ] = 16
    min_tokens: Annotated[
        Count,
        spec("Tokens that come before a stop token or stop string may end the output.", "a whole number from 0 to max_tokens"),
    ] = 0
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None,
        spec(
            "Give each output token's log probability and those of so many likeliest tokens, of the model's own distribution; None: off.",
            f"a whole number from 0 to {MAX_LOGPROBS:,}, or None",
        ),
    ] = None
    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None,
        spec(
            "The same of the prompt's tokens, the first excepted; such a request doesn't read the prefix cache.",
            f"a whole number from 0 to {MAX_LOGPROBS:,}, or None",
        ),
    ] = None
    logit_bias: Annotated[
        tuple[tuple[TokenId, Bias], ...],
        BeforeValidator(_bias_as_pairs),
        spec("Added to the logits of these tokens; -100 as good as bans one.", "a mapping of token ids to numbers from -100 to 100"),
    ] = ()
    allowed_token_ids: Annotated[
        tuple[TokenId, ...],
        BeforeValidator(_none_as_empty),
        spec("If not empty, no other token is ever chosen.", "a list of token ids of the model's vocabulary"),
    ] = ()
    bad_words: Annotated[
        tuple[StopString, ...],
        BeforeValidator(_none_as_empty),
        spec(
            "Texts that may not be generated: the last token of what would complete one is banned.",
            f"a list of up to {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_LENGTH} characters",
            max_length=MAX_STOP_STRINGS,
        ),
    ] = ()
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        BeforeValidator(_structured),
        spec(
            "The output must follow a JSON schema, a regular expression, a choice or a grammar; None: off.",
            "StructuredOutputsParams, a mapping of its fields, or None",
        ),
    ] = None
    logits_processors: Annotated[
        tuple[LogitsProcessor, ...],
        BeforeValidator(_none_as_empty),
        spec(
            "Functions (output ids, logits) -> logits, or (prompt ids, output ids, logits) -> logits, called for each token; Python alone.",
            "a list of functions",
        ),
    ] = ()
    skip_special_tokens: Annotated[bool, spec("Leave special tokens out of the output text.", "True or False")] = True
    spaces_between_special_tokens: Annotated[
        bool,
        spec(
            "Leave the spaces that the tokenizer's decoder writes between special tokens that are shown; byte-level ones write none.",
            "True or False",
        ),
    ] = True
    truncate_prompt_tokens: Annotated[
        Annotated[int, Field(ge=-1, le=LARGEST)] | None,
        spec(
            "Keep only so many of the prompt's last tokens; -1: as many as fit the context with max_tokens; None: off.",
            "a whole number, 1 or above, -1, or None",
        ),
    ] = None
    priority: Annotated[
        Annotated[int, Field(ge=-LARGEST, le=LARGEST)],
        spec("Lower is sooner, where the scheduler's order is priority; what the call itself says counts more.", "a whole number"),
    ] = 0
    timeout_s: Annotated[
        Annotated[float, Field(gt=0)] | None,
        spec("Seconds after which the request ends with what it has, its finish reason timeout; None: never.", "a number above 0, or None"),
    ] = None
    cache_salt: Annotated[str, spec("Cached prefixes are shared only among prompts of equal salt.", "a string")] = ""
    known_output_len: Annotated[
        Length | None,
        spec(
            "The output's length, known beforehand where recorded traffic is replayed; needs ignore_eos.",
            "a whole number from 1 to max_tokens, or None",
        ),
    ] = None

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler: ModelWrapValidatorHandler[SamplingParams]) -> SamplingParams:
        try:
            params = handler(data)
        except ValidationError as error:
            refuse(error.errors(include_url=False)[0], FIELDS, kind="sampling")
        params._check_together()
        return params

    def _check_together(self) -> None:
        """What no field can check alone."""
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of = {self.best_of}: must be at least n, which is {self.n}", field="best_of")
        if self.greedy and self.width > 1:
            field = "n" if self.n > 1 else "best_of"
            raise RequestError(
                f"{field} = {self.width} with temperature = {self.temperature}: greedy sampling gives {self.width} equal outputs; "
                f"ask for {field} = 1, or a temperature of at least {GREEDY_BELOW}",
                field=field,
            )
        if self.truncate_prompt_tokens == 0:
            field = "truncate_prompt_tokens"
            raise RequestError(f"{field} = 0: must be {allowed(FIELDS[field])}", field=field)
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

    @property
    def width(self) -> int:
        """Outputs that are sampled."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens whose log probabilities are wanted beside each sampled one's; None: not even that one's."""
        return 0 if self.logprobs is None and self.width > self.n else self.logprobs

    @property
    def penalised(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def reads_output(self) -> bool:
        """Whether a token's choice needs the ids of all tokens before it on the host."""
        return self.penalised or bool(self.bad_words or self.logits_processors or self.structured_outputs)

    @property
    def takes_likeliest(self) -> bool:
        """Whether each token (from `min_tokens` on) is the likeliest by the model's own logits, which nobody wants to see."""
        return self.greedy and not (self.reads_output or self.logit_bias or self.allowed_token_ids) and self.num_logprobs is None


# In the order of declaration, which is that of positional arguments.
FIELDS: dict[str, FieldInfo] = vars(SamplingParams)["__pydantic_fields__"]


def validate_for(params: SamplingParams, *, vocab_size: int) -> None:
    """Check what needs the model: `vocab_size` is the number of logits. Raises RequestError."""
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
    }
    for field, token_ids in named.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise RequestError(f"{field} holds {token_id}: must be below the vocabulary's size, which is {vocab_size}", field=field)
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        if count is not None and count > vocab_size:
            raise RequestError(f"{field} = {count}: the vocabulary has {vocab_size} tokens", field=field)

"""What chat and text completions ask for in the same words: sampling, streaming, and Octavo's own fields beside OpenAI's.

Checked here is the form; the values of sampling fields are checked by `SamplingParams`, whose refusals name the field.
Must not know: engines, tokenizers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from octavo.core.parameters import allowed
from octavo.core.sampling_params import FIELDS

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a body has room for millions of them, and each error costs more than an item."""


def _described(name: str) -> Any:
    field = FIELDS[name]
    return Field(None, description=f"{field.description} It must be {allowed(field)}.")


class Schema(BaseModel):
    """A part of a request: an unknown field is an error, never dropped in silence."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Schema):
    """What a stream carries besides its text."""

    include_usage: Flag = Field(False, description="one last chunk with no choices and the usage of the whole request")
    include_obfuscation: Flag = Field(False, description="accepted; nothing is added to hide lengths")
    continuous_usage_stats: Flag = Field(False, description="the usage so far in every chunk, as vLLM has it")


class SamplingFields(Schema):
    """OpenAI's sampling fields, and Octavo's, under the names of `SamplingParams`. None: the model's default."""

    n: Whole | None = _described("n")
    temperature: Number | None = _described("temperature")
    top_p: Number | None = _described("top_p")
    presence_penalty: Number | None = _described("presence_penalty")
    frequency_penalty: Number | None = _described("frequency_penalty")
    seed: Whole | None = _described("seed")
    stop: str | Items[str] | None = _described("stop")
    logit_bias: dict[str, Number] | None = _described("logit_bias")
    stream: Flag | None = Field(None, description="server-sent events with what is new, instead of one answer at the end")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    user: str | None = Field(None, description="who asks; seen by schedulers and in traces, nothing else")
    # Octavo's own
    top_k: Whole | None = _described("top_k")
    min_p: Number | None = _described("min_p")
    repetition_penalty: Number | None = _described("repetition_penalty")
    stop_token_ids: Items[Whole] | None = _described("stop_token_ids")
    include_stop_str_in_output: Flag | None = _described("include_stop_str_in_output")
    ignore_eos: Flag | None = _described("ignore_eos")
    min_tokens: Whole | None = _described("min_tokens")
    allowed_token_ids: Items[Whole] | None = _described("allowed_token_ids")
    bad_words: Items[str] | None = _described("bad_words")
    prompt_logprobs: Whole | None = _described("prompt_logprobs")
    structured_outputs: dict[str, Any] | None = _described("structured_outputs")
    skip_special_tokens: Flag | None = _described("skip_special_tokens")
    spaces_between_special_tokens: Flag | None = _described("spaces_between_special_tokens")
    truncate_prompt_tokens: Whole | None = _described("truncate_prompt_tokens")
    cache_salt: str | None = _described("cache_salt")
    timeout_s: Number | None = _described("timeout_s")
    priority: Whole | None = _described("priority")
    request_id: str | None = Field(None, min_length=1, max_length=256, description="the id of the request in the engine and in its answer")
    return_token_ids: Flag | None = Field(None, description="also give the ids of prompt and output tokens")
    use_beam_search: Flag | None = Field(None, description="beam search over n beams instead of sampling")
    length_penalty: Number | None = Field(None, description="of beam search: scores are divided by length to this power")
    early_stopping: Flag | Literal["never"] | None = Field(None, description="of beam search: when it ends")


SAMPLING = tuple(name for name in SamplingFields.model_fields if name in FIELDS)
"""Fields that go to `SamplingParams` under the same name."""


class JsonSchema(Schema):
    """A named JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Flag | None = Field(None, description="accepted; the output always follows the schema")


class ResponseFormat(Schema):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(0, description="whose keys and values were found in the prefix cache")


class Usage(BaseModel):
    """Tokens of a request, each counted once, whatever was computed again."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

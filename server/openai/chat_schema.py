"""Requests and answers of /v1/chat/completions, as OpenAI documents them.

Must not know: engines, tokenizers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from octavo.core.parameters import LARGEST
from octavo.core.sampling_params import MAX_LOGPROBS
from octavo.server.openai.common_schema import Flag, Items, ResponseFormat, SamplingFields, Schema, Usage, Whole
from octavo.server.openai.not_served import NotServed

TEXT_ONLY = "this server reads text only: no images, sound or files"


class TextPart(Schema):
    """A piece of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") in ("image_url", "input_audio", "file"):
            raise PydanticCustomError("not_served", "{reason}", {"reason": TEXT_ONLY})
        return part


class FunctionCall(Schema):
    """A call that the model asked for."""

    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(Schema):
    """A call with its id."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Schema):
    """One message of a conversation. Only text: images and sound are refused."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = Field(None, description="accepted, as it comes back in OpenAI's answers")
    annotations: list[Any] | None = Field(None, description="the same")
    function_call: Annotated[None, NotServed("OpenAI's old form of tool_calls is not served: use tool_calls")] = None
    audio: Annotated[None, NotServed(TEXT_ONLY)] = None


class FunctionDefinition(Schema):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = Field(None, description="arguments follow the schema also where the model may call, not must")


class Tool(Schema):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Schema):
    """Names a function."""

    name: str


class NamedTool(Schema):
    """The model must call this function."""

    type: Literal["function"]
    function: FunctionName


class SomeTools(Schema):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedTools(Schema):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


def _kind_of_choice(value: Any) -> str:
    if isinstance(value, dict):
        return "some" if value.get("type") == "allowed_tools" else "named"
    return "named" if isinstance(value, NamedTool) else "some" if isinstance(value, AllowedTools) else "word"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedTool, Tag("named")] | Annotated[AllowedTools, Tag("some")],
    Discriminator(_kind_of_choice),
]


class ChatCompletionRequest(SamplingFields):
    """A conversation to go on with. Fields that change the answer and are not served are refused by name."""

    messages: Items[Message] = Field(min_length=1)
    model: str | None = Field(None, description="a served model's name; absent: the one that is served")
    max_tokens: Whole | None = Field(None, description="most tokens of one answer; absent: the rest of the context")
    max_completion_tokens: Whole | None = Field(None, ge=1, le=LARGEST, description="OpenAI's newer name of max_tokens")
    logprobs: Flag | None = Field(None, description="give the log probability of each token")
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_LOGPROBS, description="and those of so many likeliest ones; needs logprobs")
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = Field(None, description="whether an answer may hold more than one call")
    add_generation_prompt: Flag = Field(True, description="let the template begin the assistant's message")
    echo: Literal[False] | None = None
    # OpenAI's, without effect on the answer
    metadata: dict[str, Any] | None = None
    store: Annotated[Literal[False] | None, NotServed("this server stores no answers: leave it out")] = None
    service_tier: str | None = Field(None, description="accepted: there is one service; see the header X-Octavo-Class")
    modalities: Annotated[Items[Literal["text"]] | None, NotServed(TEXT_ONLY)] = None
    prompt_cache_key: str | None = Field(None, description="accepted: prefixes are found by their tokens")
    prompt_cache_retention: str | None = Field(None, description="accepted: cached prefixes stay as long as there is room")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="accepted: as above")
    safety_identifier: str | None = None
    prediction: dict[str, Any] | None = Field(None, description="accepted: it changes the speed at most")
    # OpenAI's, which would change the answer
    audio: Annotated[None, NotServed("this server writes text only: no sound")] = None
    functions: Annotated[None, NotServed("OpenAI's old form of tools is not served: use tools")] = None
    function_call: Annotated[None, NotServed("OpenAI's old form of tool_choice is not served: use tool_choice")] = None
    web_search_options: Annotated[None, NotServed("this server has no access to the web")] = None
    reasoning_effort: Annotated[Literal["none"] | None, NotServed("this server has no levels of reasoning: only none")] = None
    verbosity: Annotated[None, NotServed("this server has no levels of verbosity: say in a message how long the answer should be")] = None
    moderation: Annotated[None, NotServed("this server moderates nothing")] = None


class TopLogprob(BaseModel):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = Field(None, description="the stop string or stop id that was met")
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer as a whole."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: str | None = None
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None


class CallDelta(BaseModel):
    """What is new of a function call."""

    name: str | None = Field(None, description="in the first piece alone")
    arguments: str


class ToolCallDelta(BaseModel):
    """What is new of a call."""

    index: int
    id: str | None = Field(None, description="in the first piece alone")
    type: Literal["function"] | None = None
    function: CallDelta


class Delta(BaseModel):
    """What is new of a message."""

    role: Literal["assistant"] | None = Field(None, description="in the first chunk of a choice alone")
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed answer. The last one may have usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: list[Any] | None = Field(None, description="in the first chunk alone")
    prompt_token_ids: list[int] | None = Field(None, description="in the first chunk alone")

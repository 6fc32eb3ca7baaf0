"""`ChatAnswer`: what the engine brings, as OpenAI's chat completion or the chunks of one.

Must not know: how an answer is made, sockets.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator

from fastapi.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.prompts import ReadyPrompt
from octavo.server.errors import ApiError
from octavo.server.openai.answers import GRAMMAR, Chunks, new_id, plain_logprobs, quoted, streamed, usage
from octavo.server.openai.chat_schema import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChoiceLogprobs,
    FunctionCall,
    ToolCall,
)
from octavo.server.openai.merging import merged
from octavo.server.openai.params import structure, wanted
from octavo.server.openai.token_texts import Place, TokenTexts
from octavo.server.openai.tool_reader import CallPiece, ToolPiece, ToolReader
from octavo.server.openai.tools import tool_use
from octavo.server.served import Served


class ChatAnswer:
    """The answer to one request."""

    def __init__(self, here: Served, body: ChatCompletionRequest) -> None:
        """Raises RequestError, or ApiError, for what cannot be served."""
        if body.max_tokens is not None and body.max_completion_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs = true", param="top_logprobs")
        self.model = here.check_model(body.model)
        self.id = new_id("chatcmpl", body.request_id)
        self.headers = {"X-Request-Id": self.id} if self.id.isascii() and self.id.isprintable() else {}
        self.created = int(time.time())
        self.tools = tool_use(body, tags_calls=here.llm.prompts.tokenizer.tags_calls)
        with_calls = self.tools.output if self.tools is not None else None
        self.grammar_field = self.tools.field if self.tools and with_calls else "response_format" if body.response_format else GRAMMAR
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        self.wanted = wanted(
            body,
            of_model=here.llm.built.default_sampling,
            defaults={"max_tokens": None},
            settings=here.settings,
            max_tokens=limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=with_calls or structure(body, body.response_format),
        )
        self._texts = TokenTexts(here.llm.prompts.tokenizer, skip_special_tokens=body.skip_special_tokens is not False)
        self._options = body.stream_options
        self._wants_ids = bool(body.return_token_ids)

    # ------------------------------------------------------------------ at once

    def response(self, body: bytes) -> Response:
        """The answer that is not streamed."""
        return Response(body, media_type="application/json", headers=self.headers)

    def whole(self, output: RequestOutput) -> bytes:
        """Its body."""
        outputs = output.outputs * self.wanted.copies
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(number, one) for number, one in enumerate(outputs)],
            usage=usage(
                prompt_tokens=output.num_prompt_tokens,
                completion_tokens=sum(len(one.token_ids) for one in outputs),
                cached_tokens=output.num_cached_tokens,
            ),
            prompt_logprobs=plain_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self._wants_ids else None,
        )
        return answer.model_dump_json().encode()

    def _choice(self, number: int, output: CompletionOutput) -> ChatChoice:
        message, reason = AnswerMessage(content=output.text), output.finish_reason
        if self.tools is not None:
            reader = self.tools.reader()
            found = reader.push(output.text, last=True)
            calls = [
                ToolCall(id=call.id or "", function=FunctionCall(name=call.name or "", arguments=call.arguments)) for call in found.calls
            ]
            message = AnswerMessage(content=found.content or (None if calls else ""), tool_calls=calls or None)
            reason = _reason(reason, reader)
        return ChatChoice(
            index=number,
            message=message,
            logprobs=self._logprobs(output, Place()),
            finish_reason=reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._wants_ids else None,
        )

    # ----------------------------------------------------------------- in pieces

    def events(self, first: RequestOutput, rest: AsyncGenerator[RequestOutput], ready: ReadyPrompt) -> AsyncGenerator[bytes]:
        """All events of a streamed answer, `[DONE]` included, whatever happens in between."""
        chunks = Chunks(
            {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model, "system_fingerprint": None},
            self._options,
        )
        choices: dict[int, _Choice] = {}
        copies = self.wanted.copies

        def write(_: int, piece: RequestOutput) -> Iterator[str]:
            for output in piece.outputs:
                chunks.made += len(output.token_ids) * copies
                for number in range(output.index, output.index + copies):
                    choice = choices.get(number)
                    if choice is None:
                        choice = choices[number] = _Choice(self.tools.reader() if self.tools is not None else None)
                        yield chunks.choice(number, OPENING, self._of_prompt(piece, ready) if len(choices) == 1 else "")
                    if output.text or output.token_ids or output.finish_reason:
                        yield chunks.choice(number, self._content(output, choice))

        return streamed(chunks, merged([first], [rest]), write)

    def _of_prompt(self, piece: RequestOutput, ready: ReadyPrompt) -> str:
        """What the first chunk tells of the prompt, to who asked."""
        more = ""
        if piece.prompt_logprobs is not None:
            more += f',"prompt_logprobs":{json.dumps(plain_logprobs(piece.prompt_logprobs))}'
        if self._wants_ids:
            more += f',"prompt_token_ids":{json.dumps(ready.token_ids[-piece.num_prompt_tokens :])}'
        return more

    def _content(self, output: CompletionOutput, choice: _Choice) -> str:
        reason, delta = output.finish_reason, ""
        if choice.reader is not None:
            delta = _delta(choice.reader.push(output.text, last=reason is not None))
            reason = _reason(reason, choice.reader)
        elif output.text:
            delta = f'"content":{quoted(output.text)}'
        logprobs = self._logprobs(output, choice.place)
        told = "null" if logprobs is None else logprobs.model_dump_json()
        content = f'"delta":{{{delta}}},"logprobs":{told},"finish_reason":{json.dumps(reason)}'
        if reason:
            content += f',"stop_reason":{json.dumps(output.stop_reason, ensure_ascii=False)}'
        if self._wants_ids:
            content += f',"token_ids":{json.dumps(output.token_ids)}'
        return content

    def _logprobs(self, output: CompletionOutput, place: Place) -> ChoiceLogprobs | None:
        return None if output.logprobs is None else self._texts.for_chat(output.token_ids, output.logprobs, place)


OPENING = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
"""What a choice begins with."""


class _Choice:
    """How far the stream of one choice has come."""

    def __init__(self, reader: ToolReader | None) -> None:
        self.reader = reader
        self.place = Place()


def _reason(reason: str | None, reader: ToolReader) -> str | None:
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


def _delta(piece: ToolPiece) -> str:
    members = []
    if piece.content:
        members.append(f'"content":{quoted(piece.content)}')
    if piece.calls:
        members.append(f'"tool_calls":[{",".join(map(_call, piece.calls))}]')
    return ",".join(members)


def _call(call: CallPiece) -> str:
    arguments = quoted(call.arguments)
    if call.id is None:
        return f'{{"index":{call.index},"function":{{"arguments":{arguments}}}}}'
    head = f'"index":{call.index},"id":{json.dumps(call.id)},"type":"function"'
    return f'{{{head},"function":{{"name":{json.dumps(call.name)},"arguments":{arguments}}}}}'

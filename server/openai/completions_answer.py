"""`CompletionAnswer`: what the engine brings, as OpenAI's text completion or the chunks of one.

Must not know: how an answer is made, sockets.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace

from fastapi.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.prompts import ReadyPrompt
from octavo.server.errors import ApiError
from octavo.server.openai.answers import GRAMMAR, Chunks, new_id, plain_logprobs, quoted, streamed, usage
from octavo.server.openai.completions_schema import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from octavo.server.openai.merging import merged
from octavo.server.openai.params import structure, wanted
from octavo.server.openai.token_texts import Place, TokenTexts
from octavo.server.served import Served


class CompletionAnswer:
    """The answer to one request."""

    def __init__(self, here: Served, body: CompletionRequest) -> None:
        """Raises RequestError, or ApiError, for what cannot be served."""
        self._echo = bool(body.echo)
        self._nothing_new = body.max_tokens == 0
        if self._nothing_new and not self._echo:
            raise ApiError(400, "max_tokens = 0: nothing would come back; only with echo = true", param="max_tokens")
        self.model = here.check_model(body.model)
        self.id = new_id("cmpl", body.request_id)
        self.headers = {"X-Request-Id": self.id} if self.id.isascii() and self.id.isprintable() else {}
        self.created = int(time.time())
        self.grammar_field = "response_format" if body.response_format else GRAMMAR
        self.wanted = wanted(
            body,
            of_model=here.llm.built.default_sampling,
            defaults={"max_tokens": 16},
            settings=here.settings,
            max_tokens=1 if self._nothing_new else body.max_tokens,
            best_of=body.best_of,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if self._echo and body.prompt_logprobs is None else body.prompt_logprobs,
            structured_outputs=structure(body, body.response_format),
        )
        self._truncates = body.truncate_prompt_tokens is not None
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._logprobs = body.logprobs
        self._options = body.stream_options
        self._wants_ids = bool(body.return_token_ids)
        self._tokenizer = here.llm.prompts.tokenizer
        self._texts = TokenTexts(self._tokenizer, skip_special_tokens=body.skip_special_tokens is not False)

    # ------------------------------------------------------------------ at once

    def response(self, body: bytes) -> Response:
        """The answer that is not streamed."""
        return Response(body, media_type="application/json", headers=self.headers)

    def whole(self, answers: list[RequestOutput]) -> bytes:
        """Its body."""
        choices = [self._choice(answer, self._shown(output)) for answer in answers for output in answer.outputs * self.wanted.copies]
        made = 0 if self._nothing_new else sum(len(o.token_ids) for answer in answers for o in answer.outputs) * self.wanted.copies
        body = Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[choice.model_copy(update={"index": number}) for number, choice in enumerate(choices)],
            usage=usage(
                prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
                completion_tokens=made,
                cached_tokens=sum(answer.num_cached_tokens for answer in answers),
            ),
        )
        return body.model_dump_json().encode()

    def _choice(self, answer: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        text = self._prompt_text(answer, answer.prompt_token_ids) + output.text if self._echo else output.text
        return CompletionChoice(
            index=0,
            text=text,
            logprobs=self._columns(answer, output, answer.prompt_token_ids, Place()),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=plain_logprobs(answer.prompt_logprobs) if self._wants_prompt_logprobs else None,
            token_ids=output.token_ids if self._wants_ids else None,
            prompt_token_ids=answer.prompt_token_ids if self._wants_ids else None,
        )

    def _shown(self, output: CompletionOutput) -> CompletionOutput:
        """For `max_tokens = 0` the engine makes one token, which nobody asked for."""
        if not self._nothing_new:
            return output
        return replace(output, text="", token_ids=[], finish_reason="length", stop_reason=None, logprobs=output.logprobs and [])

    def _prompt_text(self, answer: RequestOutput, prompt_ids: list[int]) -> str:
        return self._tokenizer.decode(prompt_ids) if answer.prompt is None or self._truncates else answer.prompt

    def _columns(self, answer: RequestOutput, output: CompletionOutput, prompt_ids: list[int], place: Place) -> CompletionLogprobs | None:
        """Of a whole output, or what is new of it. `prompt_ids`: what stands before it, with `echo`."""
        if output.logprobs is None:
            return None
        ids, entries = output.token_ids, [*output.logprobs]
        if self._echo and answer.prompt_logprobs is not None and not place.begun:
            return self._texts.for_completions(
                [*prompt_ids, *ids], [*answer.prompt_logprobs, *entries], place, with_top=bool(self._logprobs)
            )
        return self._texts.for_completions(ids, entries, place, with_top=bool(self._logprobs))

    # ----------------------------------------------------------------- in pieces

    def events(
        self, firsts: list[RequestOutput], runs: list[AsyncGenerator[RequestOutput]], prompts: Sequence[ReadyPrompt]
    ) -> AsyncGenerator[bytes]:
        """All events of a streamed answer, `[DONE]` included, whatever happens in between."""
        chunks = Chunks(
            {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "system_fingerprint": None},
            self._options,
        )
        copies = self.wanted.copies
        width = self.wanted.width * copies
        for number, first in enumerate(firsts):
            chunks.saw(number, first)
        begun = dict[int, Place]()

        def write(number: int, piece: RequestOutput) -> Iterator[str]:
            for output in map(self._shown, piece.outputs):
                chunks.made += len(output.token_ids) * copies
                start = number * width + output.index
                for index in range(start, start + copies):
                    yield chunks.choice(index, self._content(firsts[number], output, prompts[number], begun, index))

        return streamed(chunks, merged(firsts, runs), write)

    def _content(self, first: RequestOutput, output: CompletionOutput, prompt: ReadyPrompt, begun: dict[int, Place], index: int) -> str:
        place, text, more = begun.get(index), output.text, ""
        prompt_ids: list[int] = []
        if place is None:
            place = begun[index] = Place()
            prompt_ids = prompt.token_ids[-first.num_prompt_tokens :]
            if self._echo:
                text = self._prompt_text(first, prompt_ids) + text
            if self._wants_ids:
                more += f',"prompt_token_ids":{json.dumps(prompt_ids)}'
            if self._wants_prompt_logprobs:
                more += f',"prompt_logprobs":{json.dumps(plain_logprobs(first.prompt_logprobs))}'
        logprobs = self._columns(first, output, prompt_ids, place)
        told = "null" if logprobs is None else logprobs.model_dump_json()
        reason = quoted(output.finish_reason) if output.finish_reason else "null"
        content = f'"text":{quoted(text)},"logprobs":{told},"finish_reason":{reason}'
        if output.finish_reason:
            content += f',"stop_reason":{json.dumps(output.stop_reason, ensure_ascii=False)}'
        if self._wants_ids:
            content += f',"token_ids":{json.dumps(output.token_ids)}'
        return content + more

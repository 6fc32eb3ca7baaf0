"""`AsyncLLM`: an engine for online use. Requests come at any time from one event loop; the engine steps in a thread of its own.

What a step brings is handed to the event loop in one call. A reader who is slower than the engine gets its pieces joined, so what
waits for it stays small. Must not know: HTTP, plugins by name, tensors.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from octavo.core.assembly import BuiltEngine, open_engine
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.engine import Engine
from octavo.core.engine_loop import EngineLoop
from octavo.core.errors import EngineError, RequestError
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.mailbox import Mailbox
from octavo.prompts import ABOUT, Messages, Prompt, PromptReader, ReadyPrompt

LONG_TEXT = 20_000  # characters; tokenizing more is done in a thread, where it holds nobody up


class AsyncLLM:
    """A model with a stack around it, for one event loop. Close it, or use it in an `async with` block.

    Settings as for `LLM`. Raises ConfigError and its children, ModelSourceError.
    """

    built: BuiltEngine

    def __init__(self, model: str | os.PathLike[str] | None = None, *, config: str | Path | None = None, **settings: Any) -> None:
        self._start(lambda: open_engine(model, config=config, **settings))

    @classmethod
    def from_builder(cls, build: Callable[[], BuiltEngine]) -> Self:
        """Around an engine that `build` makes; it is called in the engine's thread."""
        llm = cls.__new__(cls)
        llm._start(build)
        return llm

    def _start(self, build: Callable[[], BuiltEngine]) -> None:
        def built_engine() -> Engine:
            self.built = build()
            return self.built.engine

        self.on_death: Callable[[BaseException], None] | None = None  # told in the event loop
        self.on_request: Callable[[str], None] | None = None  # told the id before the engine has the request, in the asker's context
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}  # of requests that the engine has; its thread alone touches it
        self._open: set[Mailbox] = set()  # all that somebody reads
        self._calls: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._given_up: EngineError | None = None
        self.engine_loop = EngineLoop(built_engine, deliver=self._deliver, died=self._died)
        self.engine_loop.start()
        self.prompts = PromptReader(self.built.loaded, max_model_len=self.built.engine.max_model_len)

    # -------------------------------------------------------------------- answers

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
        **about: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Continue one prompt: pieces with what is new, or (`stream=False`) the whole answer alone.

        Without params: the model's defaults, see `get_default_sampling_params`.
        `about`: `priority`, `class` and `user`. Leaving the loop aborts the request. Raises RequestError, or EngineError if the engine
        has stopped.
        """
        ready = await self._read(self.prompts.prompt, prompt, len(prompt) if isinstance(prompt, str) else 0)
        params = self.built.default_params(len(ready.token_ids), max_tokens=16) if sampling_params is None else sampling_params
        async for output in self.run(ready, params, request_id=request_id, stream=stream, **about):
            yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **about: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer a conversation through the model's chat template; otherwise as `generate`."""
        size = sum(len(str(message)) for message in messages) if isinstance(messages, Sequence) else 0  # else refused
        ready = await self._read(lambda given: self.prompts.conversation(given, tools), messages, size)
        params = self.built.default_params(len(ready.token_ids), max_tokens=None) if sampling_params is None else sampling_params
        async for output in self.run(ready, params, request_id=request_id, stream=stream, **about):
            yield output

    def get_default_sampling_params(self) -> SamplingParams:
        """As `LLM.get_default_sampling_params`: what counts where a call brings no params."""
        return SamplingParams(**self.built.default_sampling)

    async def run(
        self,
        ready: ReadyPrompt,
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        stream: bool = True,
        **about: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """The same for a prompt that was made ready before; with BeamSearchParams, one whole answer even to `stream`."""
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}", field="sampling_params")
        for name in about:
            if name not in ABOUT:
                raise TypeError(f"unexpected keyword argument {name!r}")
        grammars = self.built.engine.grammars
        if isinstance(params, SamplingParams) and params.structured_outputs is not None and grammars is not None:
            await asyncio.to_thread(grammars.compile, params.structured_outputs)  # here it holds nobody up; the engine finds it
        about = {"priority": None, "class": "default", "user": "", **about, **ready.about}
        mailbox = Mailbox(self._event_loop())

        def add(engine: Engine) -> None:
            try:
                request = engine.add_request(
                    ready.token_ids,
                    params,
                    request_id=request_id,
                    prompt_text=ready.text,
                    priority=about["priority"],
                    class_name=about["class"],
                    user=about["user"],
                    stream=stream,
                )
            except Exception as error:  # of this request alone
                mailbox.fail_from_engine(error)
            else:
                mailbox.request_id = request.id
                if mailbox.left:  # nobody waits any more
                    engine.abort(request.id)
                    engine.discard(request.id)
                else:
                    self._mailboxes[request.id] = mailbox

        if self.on_request is not None and request_id is not None:
            self.on_request(request_id)
        self._post(add)
        self._open.add(mailbox)
        try:
            async for output in mailbox:
                yield output
        finally:
            self._open.discard(mailbox)
            if not mailbox.finished:
                mailbox.left = True
                self._abort(mailbox)

    async def abort(self, request_id: str) -> None:
        """End a request now: its last piece says `abort`. Unknown and ended ids are fine."""
        self._post_if_alive(lambda engine: engine.abort(request_id))

    async def abort_all(self) -> None:
        """End all requests now; the last piece of each says `abort`."""
        self._post_if_alive(_abort_all)

    def fail_all(self, reason: str) -> None:
        """Whoever waits, or comes later, gets an EngineError; for when the engine's thread hangs."""
        self._given_up = EngineError(f"the engine has stopped: {reason}")
        self._fail_all(self._given_up)

    def _abort(self, mailbox: Mailbox) -> None:
        def abort(engine: Engine) -> None:
            request_id = mailbox.request_id
            if request_id is not None and self._mailboxes.get(request_id) is mailbox:  # else it is over, and its id perhaps another's
                engine.abort(request_id)
                engine.discard(request_id)
                del self._mailboxes[request_id]

        self._post_if_alive(abort)

    def _post_if_alive(self, action: Callable[[Engine], None]) -> None:
        with suppress(EngineError):  # it may stop at any moment, and then there is nothing left to end
            self._post(action)

    def _post(self, action: Callable[[Engine], None]) -> None:
        if self._given_up is not None:
            raise self._given_up
        self.engine_loop.post(action)

    async def call(self, action: Callable[[Engine], Any]) -> Any:
        """Run something on the engine between two steps and return its result, for looking at it: it must be short."""
        loop = self._event_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def act(engine: Engine) -> None:
            try:
                result = action(engine)
            except Exception as error:
                _soon(loop, _settle, future, None, error)
            else:
                _soon(loop, _settle, future, result, None)

        self._post(act)
        self._calls.add(future)
        try:
            return await future
        finally:
            self._calls.discard(future)

    async def _read(self, reader: Callable[[Any], ReadyPrompt], given: Any, size: int) -> ReadyPrompt:
        return await asyncio.to_thread(reader, given) if size > LONG_TEXT else reader(given)

    # ---------------------------------------------------------- the engine's thread

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        letters = []
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                letters.append((mailbox, output))
                if output.finished:
                    del self._mailboxes[output.request_id]
        if letters and self._loop is not None:
            _soon(self._loop, _hand_over, letters)

    def _died(self, error: BaseException) -> None:
        if self._loop is not None:
            _soon(self._loop, self._tell_death, error)

    # ------------------------------------------------------------------------ end

    def _tell_death(self, error: BaseException) -> None:
        self._fail_all(EngineError(f"the engine has stopped: {error}"))
        self._mailboxes.clear()
        if self.on_death is not None:
            self.on_death(error)

    def _fail_all(self, error: Exception) -> None:
        for mailbox in self._open:
            mailbox.fail(error)
        for future in self._calls:
            _settle(future, None, error)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EngineError("this AsyncLLM is used by another event loop: one alone may use it")
        return loop

    async def close(self, timeout_s: float = 10.0) -> None:
        """Abort what runs and give memory back. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        ended = await asyncio.to_thread(self.engine_loop.stop, timeout_s)
        self._fail_all(EngineError("the engine was closed"))
        if ended:  # else a step hangs and still works on it
            self.built.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call it in the event loop; where that was closed, nobody waits any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _abort_all(engine: Engine) -> None:
    for request_id in list(engine.requests):
        engine.abort(request_id)


def _hand_over(letters: list[tuple[Mailbox, RequestOutput]]) -> None:
    for mailbox, output in letters:
        mailbox.put(output)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)

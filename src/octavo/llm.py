"""`LLM`: an engine for offline use. All prompts are known, answers come back in the order of the prompts.

Must not know: plugins by name, tensors.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

from octavo.core.assembly import BuiltEngine, open_engine
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.engine import Engine
from octavo.core.errors import EngineError, RequestError
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.turns import Turns
from octavo.prompt_order import sending_order
from octavo.prompts import Messages, Prompt, PromptReader, ReadyPrompt

logger = logging.getLogger("octavo")

P = TypeVar("P", SamplingParams, BeamSearchParams)


class LLM:
    """A model with a stack around it. Use one thread at a time; close it, or use it in a `with` block.

    `model` is a folder, a hub id, a GGUF file or a catalogue name. `scheduler`, `allocator`, `kernel`, `ops` and `model_plugin` take a
    plugin's name or its table, `{"plugin": "paged", "block_size": 4}`; `settings` are flat names such as `max_num_seqs`, `block_size`,
    `max_model_len`, `num_kv_slots`, `dtype` (all of them: `octavo.core.settings.flat`). `config` is a TOML file that they override.

    Raises ConfigError and its children, ModelSourceError.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, config: str | Path | None = None, **settings: Any) -> None:
        self._start(open_engine(model, config=config, **settings))

    @classmethod
    def from_built(cls, built: BuiltEngine) -> Self:
        """Around an engine that was built elsewhere (several stacks may share one loaded model)."""
        llm = cls.__new__(cls)
        llm._start(built)
        return llm

    def _start(self, built: BuiltEngine) -> None:
        self._built: BuiltEngine | None = built
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # of the calls under way, by request id
        self._left: deque[str] = deque()  # requests whose call was left, to be aborted
        self._turns = Turns()

    @property
    def built(self) -> BuiltEngine:
        """The engine and how it came about."""
        if self._built is None:
            raise EngineError("this LLM is closed: make a new one")
        return self._built

    @property
    def engine(self) -> Engine:
        """The engine, to add observers or look at its pool."""
        return self.built.engine

    # -------------------------------------------------------------------- answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | None = None,
        user: str = "",
        **kwargs: str,
    ) -> list[RequestOutput]:
        """Continue one or many prompts with one set of sampling params for all or one for each; outputs are in the order of the prompts.

        Inside, prompts that begin alike are sent together, long ones first.
        `class` (given as `**{"class": "batch"}`, or in a prompt's mapping) names the class whose limits apply. A prompt that cannot be
        served is a RequestError that says which; then nothing was run. Without params: `get_default_sampling_params`.

        With `logprobs = k`, each output has in `logprobs` one dict a token: by id, the token itself first, then the k likeliest ones, each
        a `Logprob` (its log probability in the model's own distribution, its rank, its text); and in `cumulative_logprob` their sum. With
        `prompt_logprobs = k`, the answer has the same of the prompt, None for its first token. Asking changes no token.
        """
        ready = _each(_as_list(prompts), self._prompts.prompt, "prompt")
        params = self._params_for_each(sampling_params, ready, max_tokens=16)
        return self._answer(ready, params, use_tqdm=use_tqdm, about=_about(priority, user, kwargs), noun="prompt")

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: int | None = None,
        user: str = "",
        **kwargs: str,
    ) -> list[RequestOutput]:
        """The likeliest continuations of one or many prompts, otherwise as `generate`.

        Each RequestOutput has `beam_width` outputs from the best, each with its `score`, which ranks them, and `cumulative_logprob`.
        """
        ready = _each(_as_list(prompts), self._prompts.prompt, "prompt")
        each = _given_params(params, len(ready), kind=BeamSearchParams, name="params")
        return self._answer(ready, each, use_tqdm=use_tqdm, about=_about(priority, user, kwargs), noun="prompt")

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | None = None,
        user: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: str,
    ) -> list[RequestOutput]:
        """Answer one or many conversations through the model's chat template; otherwise as `generate`.

        `max_tokens` absent from given params is 16, as everywhere; without params an answer may take the rest of the context, unless
        the model's generation_config.json names a number.
        """
        ready = _each(_conversations(messages), lambda conversation: self._prompts.conversation(conversation, tools), "conversation")
        params = self._params_for_each(sampling_params, ready, max_tokens=None)
        return self._answer(ready, params, use_tqdm=use_tqdm, about=_about(priority, user, kwargs), noun="conversation")

    def stream(self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One answer in pieces, as it is made: text or a conversation in, RequestOutputs with what is new out.

        What `generate` or `chat` would return, in pieces; it starts when the first one is asked for. Leaving the loop aborts the request.
        Other calls may come in between: they take turns with it in the engine's steps.
        """
        is_text = isinstance(prompt, str | Mapping)
        ready = self._prompts.prompt(prompt) if is_text else self._prompts.conversation(prompt)
        (params,) = self._params_for_each(sampling_params, [ready], max_tokens=16 if is_text else None)
        with _Call(self) as call:
            call.add({**_about(), **ready.about}, ready, params, stream=True)
            yield from call

    def get_default_sampling_params(self) -> SamplingParams:
        """What counts where a call brings no params: what the model's generation_config.json says, else temperature 1 and 16 tokens.

        `chat` without params takes the rest of the context where the file says nothing of `max_new_tokens`.
        """
        return SamplingParams(**self.built.default_sampling)

    # --------------------------------------------------------------------- inside

    def _params_for_each(self, params: Any, ready: Sequence[ReadyPrompt], *, max_tokens: int | None) -> list[SamplingParams]:
        """Given ones as they are; without any, the defaults, with `max_tokens` where the model's files do not say it."""
        if params is not None:
            return _given_params(params, len(ready), kind=SamplingParams)
        return [self.built.default_params(len(prompt.token_ids), max_tokens=max_tokens) for prompt in ready]

    def _answer(
        self,
        prompts: list[ReadyPrompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        *,
        use_tqdm: bool,
        about: Mapping[str, Any],
        noun: str,
    ) -> list[RequestOutput]:
        indices: dict[str, int] = {}
        answers: dict[int, RequestOutput] = {}
        with _Call(self) as call:
            for index in sending_order([prompt.token_ids for prompt in prompts], block_size=self.engine.kv.block_size):
                with _naming(noun, index, len(prompts)):
                    indices[call.add({**about, **prompts[index].about}, prompts[index], params[index])] = index
            with tqdm(total=len(prompts), unit=noun, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                made = 0
                for output in call:
                    answers[indices[output.request_id]] = output
                    made += sum(len(o.token_ids) for o in output.outputs)
                    bar.update()
                    if elapsed := bar.format_dict["elapsed"]:
                        bar.set_postfix_str(f"{made / elapsed:.1f} output tok/s")
        return [answers[index] for index in range(len(prompts))]

    @property
    def _prompts(self) -> PromptReader:
        return PromptReader(self.built.loaded, max_model_len=self.built.engine.max_model_len)

    # ------------------------------------------------------------------------ end

    def _abort_left(self) -> None:
        """End the requests of calls that were left, and drop what would have come out; one that fails does not keep the others."""
        errors = []
        with self._turns.take():
            while self._left:
                request_id = self._left.popleft()
                try:
                    self.engine.abort(request_id)
                except Exception as error:
                    errors.append(error)
                self.engine.discard(request_id)
        if errors:
            logger.error("aborting a request failed: %s", errors[0], exc_info=errors[0])

    def close(self) -> None:
        """Abort what runs and give memory back. Twice is fine."""
        if self._built is not None:
            self._built.engine.close()
            self._built = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Call:
    """The requests of one call, and what comes out for them. However the block is left, no request of it stays in the engine.

    Several calls can be under way (streams are read piece by piece): a step made for one puts the others' outputs into their inboxes.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._ids: list[str] = []
        self._inbox: deque[RequestOutput] = deque()

    def add(self, about: Mapping[str, Any], ready: ReadyPrompt, params: SamplingParams | BeamSearchParams, *, stream: bool = False) -> str:
        """Send a request; returns its id. Raises RequestError."""
        with self._llm._turns.take():
            request = self._engine.add_request(
                ready.token_ids,
                params,
                prompt_text=ready.text,
                priority=about["priority"],
                class_name=about["class"],
                user=about["user"],
                stream=stream,
            )
            self._ids.append(request.id)
            self._llm._inboxes[request.id] = self._inbox
        return request.id

    def __iter__(self) -> Iterator[RequestOutput]:
        """Step until all requests have ended, handing out what concerns them."""
        unfinished = len(self._ids)
        while unfinished:
            while not self._inbox:
                self._step()
            output = self._inbox.popleft()
            unfinished -= output.finished
            yield output

    def _step(self) -> None:
        engine, inboxes = self._llm.engine, self._llm._inboxes  # asked anew: the LLM may have been closed meanwhile
        self._llm._abort_left()
        with self._llm._turns.take():
            if not engine.has_work:
                raise EngineError("the engine has nothing to do, yet an answer is waited for: was engine.step() called from outside?")
            for output in engine.step():
                inbox = inboxes.get(output.request_id)
                if inbox is not None:  # None: aborted
                    inbox.append(output)
        if engine.wait_until is not None:
            engine.clock.sleep_until(engine.wait_until)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for request_id in self._ids:
            self._llm._inboxes.pop(request_id, None)
        self._llm._left.extend(self._ids)
        if self._llm._built is not None and self._llm._turns.free():  # else: collected in the middle of a step, aborted before the next
            self._llm._abort_left()


def _as_list(prompts: object) -> list[Any]:
    return list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping) else [prompts]


def _conversations(messages: Any) -> list[Any]:
    """Many where the first entry is no message but a list of its own."""
    many = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0 and not isinstance(messages[0], Mapping)
    return list(messages) if many else [messages]


def _each(items: list[Any], make: Callable[[Any], ReadyPrompt], noun: str) -> list[ReadyPrompt]:
    ready = []
    for index, item in enumerate(items):
        with _naming(noun, index, len(items)):
            ready.append(make(item))
    return ready


@contextmanager
def _naming(noun: str, index: int, count: int) -> Iterator[None]:
    """Say which of several prompts is to blame."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{noun} {index}: {error}", field=error.field) from error


def _about(priority: int | None = None, user: str = "", kwargs: Mapping[str, str] | None = None) -> dict[str, Any]:
    given = dict(kwargs or {})
    about = {"priority": priority, "class": given.pop("class", "default"), "user": user}
    for name in given:
        raise TypeError(f"unexpected keyword argument {name!r}")
    return about


def _given_params(params: Any, count: int, *, kind: type[P], name: str = "sampling_params") -> list[P]:
    """One for each prompt; `name` is the argument's."""
    if isinstance(params, kind):
        return [params] * count
    each = list(params) if isinstance(params, list | tuple) else [params]
    strange = [one for one in each if not isinstance(one, kind)]
    if strange:
        raise RequestError(f"{name} must be {kind.__name__}, or a list of one for each prompt, not {type(strange[0]).__name__}", field=name)
    if len(each) != count:
        raise RequestError(f"{count} prompts but {len(each)} {name.replace('_', ' ')}: give one for all, or one for each", field=name)
    return each

"""`LLM`: an engine for offline use. All prompts are known, answers come back in the order of the prompts.

Must not know: plugins by name, tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from octavo.core.assembly import BuiltEngine, build_engine, load_model
from octavo.core.engine import Engine
from octavo.core.errors import EngineError, RequestError
from octavo.core.outputs import RequestOutput
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.core.settings.flat import from_flat
from octavo.core.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""Text, or a mapping with `prompt` or `prompt_token_ids` and, if wanted, `priority`, `class` and `user` of its own."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with `role` and `content`."""


class LLM:
    """A model with a stack around it. Use one thread at a time; close it, or use it in a `with` block.

    `model` is a folder, a hub id, a GGUF file or a catalogue name. `scheduler`, `allocator`, `kernel`, `ops` and `model_plugin` take a
    plugin's name or its table, `{"plugin": "paged", "block_size": 4}`; `settings` are flat names such as `max_num_seqs`, `block_size`,
    `max_model_len`, `num_kv_slots`, `dtype` (all of them: `octavo.core.settings.flat`). `config` is a TOML file that they override.

    Raises ConfigError and its children, ModelSourceError.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, config: str | Path | None = None, **settings: Any) -> None:
        registry = Registry.discover()
        overrides = from_flat(model=None if model is None else os.fspath(model), **settings)
        checked = load_config(registry, file=config, overrides=overrides)
        self._built: BuiltEngine | None = build_engine(registry, checked, load_model(registry, checked))

    @classmethod
    def from_built(cls, built: BuiltEngine) -> Self:
        """Around an engine that was built elsewhere (several stacks may share one loaded model)."""
        llm = cls.__new__(cls)
        llm._built = built
        return llm

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
        priority: int = 0,
        user: str = "",
        **kwargs: str,
    ) -> list[RequestOutput]:
        """Continue one or many prompts with one set of sampling params for all or one for each.

        `class` (given as `**{"class": "batch"}`, or in a prompt's mapping) names the class whose limits apply. A prompt that cannot be
        served is a RequestError that says which; then nothing was run.
        """
        return self._answer([self._prompt(p) for p in _as_list(prompts)], sampling_params, use_tqdm, priority, user, _class(kwargs))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        user: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: str,
    ) -> list[RequestOutput]:
        """Answer one or many conversations through the model's chat template; otherwise as `generate`.

        `max_tokens` absent from given params is 16, as everywhere; without params an answer may take the rest of the context.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self._conversation(c, tools) for c in conversations]  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=None) if sampling_params is None else sampling_params
        return self._answer(prompts, params, use_tqdm, priority, user, _class(kwargs))

    def stream(self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One answer in pieces, as it is made: text or a conversation in, RequestOutputs with what is new out.

        Leaving the loop early aborts the request.
        """
        is_text = isinstance(prompt, str | Mapping)
        ready = self._prompt(prompt) if is_text else self._conversation(prompt, None)  # type: ignore[arg-type]
        params = sampling_params or SamplingParams(max_tokens=None)
        engine = self.engine
        request = engine.add_request(ready.token_ids, params, prompt_text=ready.text, stream=True)
        try:
            yield from self._run({request.id})
        finally:
            engine.abort(request.id)

    # --------------------------------------------------------------------- inside

    def _answer(
        self,
        prompts: list[_Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int,
        user: str,
        class_name: str,
    ) -> list[RequestOutput]:
        params = _params_for_each(sampling_params, len(prompts))
        engine, ids = self.engine, dict[str, int]()
        answers: list[RequestOutput | None] = [None] * len(prompts)
        try:
            for index in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].token_ids)):  # long ones first: shorter tail
                ready = prompts[index]
                try:
                    request = engine.add_request(
                        ready.token_ids,
                        params[index],
                        prompt_text=ready.text,
                        priority=ready.own.get("priority", priority),
                        class_name=ready.own.get("class", class_name),
                        user=ready.own.get("user", user),
                    )
                except RequestError as error:
                    raise RequestError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error), field=error.field) from None
                ids[request.id] = index
            with tqdm(total=len(prompts), unit="prompt", desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                made = 0
                for output in self._run(set(ids)):
                    answers[ids[output.request_id]] = output
                    made += sum(len(o.token_ids) for o in output.outputs)
                    bar.update()
                    if elapsed := bar.format_dict["elapsed"]:
                        bar.set_postfix_str(f"{made / elapsed:.1f} output tok/s")
        finally:
            for request_id in ids:  # an error, or Ctrl-C: nothing stays behind
                engine.abort(request_id)
        return [answer for answer in answers if answer is not None]

    def _run(self, pending: set[str]) -> Iterator[RequestOutput]:
        """Step until all these have ended, handing out what concerns them."""
        engine = self.engine
        while pending:
            for output in engine.step():
                if output.request_id in pending:
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
            if engine.wait_until is not None:
                engine.clock.sleep_until(engine.wait_until)

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.built.loaded.tokenizer
        if tokenizer is None:
            raise RequestError(f"{self.built.loaded.source.path} has no tokenizer.json: give prompt_token_ids", field="prompt")
        return tokenizer

    def _prompt(self, prompt: object) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(self._tokenizer.encode(prompt), prompt, {})
        if not isinstance(prompt, Mapping):
            raise RequestError(
                f"a prompt is text or a mapping like {{'prompt_token_ids': [1, 2]}}, not {type(prompt).__name__}", field="prompt"
            )
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "priority", "class", "user"})
        if unknown:
            raise RequestError(
                f"unknown key {unknown[0]!r} in a prompt; known: prompt, prompt_token_ids, priority, class, user", field=unknown[0]
            )
        if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError("a prompt's mapping needs exactly one of 'prompt' and 'prompt_token_ids'", field="prompt")
        own = {key: prompt[key] for key in ("priority", "class", "user") if key in prompt}
        if "prompt" in prompt:
            return _Prompt(self._tokenizer.encode(prompt["prompt"]), prompt["prompt"], own)
        ids = prompt["prompt_token_ids"]
        if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(type(token) is int for token in ids):
            raise RequestError("prompt_token_ids must be a list of whole numbers", field="prompt_token_ids")
        return _Prompt(list(ids), None, own)

    def _conversation(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> _Prompt:
        tokenizer = self._tokenizer
        ids = tokenizer.encode_chat(messages, tools=tools)
        return _Prompt(ids, tokenizer.render_chat(messages, tools=tools), {})

    # ------------------------------------------------------------------------ end

    def close(self) -> None:
        """Abort what runs and give memory back. Twice is fine."""
        if self._built is not None:
            self._built.engine.close()
            self._built = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt made ready: ids, its text if it had one, and what it says of itself."""

    token_ids: list[int]
    text: str | None
    own: Mapping[str, Any]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    return [prompts] if isinstance(prompts, str | Mapping) else list(prompts)


def _class(kwargs: Mapping[str, str]) -> str:
    unknown = sorted(set(kwargs) - {"class"})
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    return kwargs.get("class", "default")


def _params_for_each(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise RequestError(f"{count} prompts but {len(each)} sampling params: give one for all, or one for each", field="sampling_params")
    return each

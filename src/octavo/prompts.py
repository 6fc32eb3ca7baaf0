"""What users give as a prompt (text, token ids, a conversation) becomes token ids, for `LLM` and `AsyncLLM` alike.

Must not know: engines, sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.assembly import LoadedModel
from octavo.core.errors import RequestError
from octavo.core.parameters import shown
from octavo.core.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""Text, or a mapping with `prompt` or `prompt_token_ids` and, if wanted, `priority`, `class` and `user` of its own."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with `role` and `content`."""

ABOUT = ("priority", "class", "user")
"""What a request says of itself besides its prompt."""
KEYS = ("prompt", "prompt_token_ids", *ABOUT)


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """A prompt made ready: ids, its text if it had one, and those of ABOUT that it sets itself."""

    token_ids: list[int]
    text: str | None
    about: Mapping[str, Any]


class PromptReader:
    """Reads prompts with the tokenizer of one loaded model. Threads may share it. All methods raise RequestError."""

    def __init__(self, loaded: LoadedModel, *, max_model_len: int) -> None:
        self._loaded = loaded
        self._max_model_len = max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._loaded.tokenizer is None:
            raise RequestError(f"{self._loaded.source.path} has no tokenizer.json: give prompt_token_ids", field="prompt")
        return self._loaded.tokenizer

    def encode(self, text: Any, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of a text. One that cannot fit is refused by its characters, as megabytes take minutes to turn into tokens."""
        tokenizer, most = self.tokenizer, self._max_model_len
        # `longest_token` looks at the whole vocabulary the first time: not for a text that fits if its tokens are characters.
        if isinstance(text, str) and len(text) > most and len(text) > most * tokenizer.longest_token:
            raise RequestError(
                f"{field} has {len(text)} characters, more than max_model_len {most} tokens of "
                f"{tokenizer.longest_token} characters, the longest of this model, could hold",
                field=field,
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, field=field)

    def prompt(self, prompt: object) -> ReadyPrompt:
        """A text, or a mapping with either text or token ids."""
        if isinstance(prompt, str):
            return ReadyPrompt(self.encode(prompt), prompt, {})
        if not isinstance(prompt, Mapping):
            raise RequestError(
                f"a prompt is text, or a mapping like {{'prompt_token_ids': [1, 2]}} for token ids, not {type(prompt).__name__}",
                field="prompt",
            )
        unknown = sorted(key if isinstance(key, str) else shown(key) for key in prompt if key not in KEYS)
        if unknown:
            hint = "; messages go to chat()" if "role" in prompt else ""
            raise RequestError(f"unknown key {unknown[0]!r:.60} in a prompt; known: {', '.join(KEYS)}{hint}", field=unknown[0][:60])
        if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError("a prompt's mapping needs exactly one of 'prompt' and 'prompt_token_ids'", field="prompt")
        about = {key: prompt[key] for key in ABOUT if key in prompt}
        if "prompt" in prompt:
            return ReadyPrompt(self.encode(prompt["prompt"]), prompt["prompt"], about)
        ids = prompt["prompt_token_ids"]
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not all(type(token) is int for token in ids):
            raise RequestError("prompt_token_ids must be a list of whole numbers", field="prompt_token_ids")
        return ReadyPrompt(list(ids), None, about)

    def conversation(
        self, messages: Any, tools: Sequence[Mapping[str, Any]] | None = None, *, add_generation_prompt: bool = True
    ) -> ReadyPrompt:
        """A conversation through the model's chat template, which writes BOS itself."""
        text = self.tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return ReadyPrompt(self.encode(text, add_special_tokens=False, field="messages"), text, {})

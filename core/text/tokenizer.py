"""Text to token ids and back, and what a model's folder says about its tokens.

Reads the files that transformers writes (tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
generation_config.json, config.json) with the `tokenizers` library: transformers would cost seconds to import. Ids are
the same as those of its `AutoTokenizer`.

Must not know: torch, transformers, the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from octavo.core.errors import ModelSourceError, RequestError
from octavo.core.text.chat_template import NO_TEMPLATE, ChatTemplate
from octavo.core.text.detokenizer import Streams, streams_for


class Tokenizer:
    """A model's tokenizer. Immutable once made; threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        chat_templates: Mapping[str, str],
    ) -> None:
        """`special_tokens`: names and texts, such as `bos_token`. `chat_templates`: sources by name, the usual one is `default`."""
        backend.no_truncation()  # a prompt that is too long is refused, never cut in silence
        backend.no_padding()
        self._backend = backend
        self._templates = {name: ChatTemplate(source, special_tokens=special_tokens) for name, source in chat_templates.items()}
        self._streams: dict[bool, Streams] = {}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.added_tokens = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = backend.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Raises ModelSourceError: a file is missing or can't be read."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelSourceError(
                f"{path} holds no tokenizer.json; transformers can write one: "
                f"AutoTokenizer.from_pretrained(...).save_pretrained({str(path)!r})"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelSourceError(f"{file} can't be read as a tokenizer: {error}") from error
        config = _read_json(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_json(path / "special_tokens_map.json")
        special_tokens = {
            name: _text(value) for name, value in config.items() if name.endswith("_token") and isinstance(value, (str, dict))
        }
        _add_missing_tokens(backend, config, special_tokens.values())
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(path, backend, special_tokens),
            chat_templates=_chat_templates(path, config),
        )

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token as the vocabulary writes it: a token stands for no more of a text."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids; `add_special_tokens`: with BOS and the like, where the tokenizer has them. NUL is a character like others.

        Raises RequestError, `field` the parameter to blame: not a string, or one that holds half a surrogate pair.
        """
        return self._encode(text, add_special_tokens=add_special_tokens, field=field)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself, so none is added here. Raises RequestError."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self._encode(text, add_special_tokens=False, field="messages")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The prompt that the model's template makes of a conversation. Raises RequestError."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(NO_TEMPLATE, field="messages")
        return self._templates[name].render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    @property
    def tags_calls(self) -> bool:
        """Whether the model's template asks for each tool call in tags."""
        template = self._templates.get("tool_use", self._templates.get("default"))
        return template is not None and template.tags_calls

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text as the decoder gives it, no spaces cleaned up afterwards. Ids beyond the vocabulary leave no trace."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """The text of one token by itself, special tokens too; for people to look at."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, *, first: bool = False, skip_special_tokens: bool = False) -> bytes:
        """What a token adds to a text, or to an empty one (`first`), in UTF-8: part of a character, where that takes several tokens."""
        data = self.streams(skip_special_tokens=skip_special_tokens).token_bytes(token_id, first=first)
        if data is not None:
            return data
        return self._backend.decode([token_id], skip_special_tokens=skip_special_tokens).encode()  # as good as it gets

    def streams(self, *, skip_special_tokens: bool) -> Streams:
        """What all incremental detokenizers of this vocabulary share."""
        if skip_special_tokens not in self._streams:
            self._streams[skip_special_tokens] = streams_for(self._backend, skip_special_tokens=skip_special_tokens)
        return self._streams[skip_special_tokens]

    def _encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise _refused_text(text, field) from error


def _refused_text(text: object, field: str) -> RequestError:
    if not isinstance(text, str):
        return RequestError(f"{field} must be a string, not {type(text).__name__}", field=field)
    where = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    return RequestError(
        f"{field} holds half a surrogate pair, U+{ord(text[where]):04X}, at character {where}: "
        "text was cut inside a character; send the whole character, or leave it out",
        field=field,
    )


def _read_json(file: Path) -> dict[str, Any]:
    """A file's object, empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelSourceError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelSourceError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _added_token(token: str | dict[str, Any]) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True)
    known = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(token["content"], **{name: token[name] for name in known if name in token})


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: Iterable[str]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json doesn't, in transformers' order, since order gives ids."""
    by_id = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    declared = [token for _, token in by_id] + list(special_tokens) + list(extra.values() if isinstance(extra, dict) else extra)
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = {_text(token): _added_token(token) for token in reversed(declared) if _text(token) not in present}
    backend.add_tokens(list(reversed(missing.values())))


def _eos_token_ids(path: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """All ids that end an output: generation_config.json knows best, then config.json, then the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        given = _read_json(path / name).get("eos_token_id")
        if given is not None:
            ids = given if isinstance(given, list) else [given]
            if not all(type(token_id) is int for token_id in ids):
                raise ModelSourceError(f"{path / name}: eos_token_id must be a token id or a list of them, not {given!r:.60}")
            return tuple(ids)
    token_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    return () if token_id is None else (token_id,)


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Sources by name, from files where there are any, else from tokenizer_config.json (one, or a list with names)."""
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}

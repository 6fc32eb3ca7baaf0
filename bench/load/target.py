"""`Target`: a server to be measured, where it is and what it takes. What it takes is tried out, since servers differ.

Must not know: what is asked of it in a run, engines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.load.client import Record, send
from octavo.bench.load.http1 import BrokenAnswer, Connection, connect, get, post
from octavo.bench.load.workload import Ask
from octavo.core.errors import OctavoError

Decode = Callable[[Sequence[int]], str]
Prompt = Sequence[int] | str
"""Token ids or a text; of a chat a tuple of texts, by the user and the assistant in turn."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CLASS_HEADER = "X-Octavo-Class"
PROBE_S = 120.0  # a first answer may have to wait for a server that warms up
IDS: dict[str, Any] = {"return_token_ids": True}
ENDLESS: dict[str, Any] = {"ignore_eos": True}
PORTS = {"http": 80, "https": 443}
ROLES = ("user", "assistant")


class TargetError(OctavoError):
    """No server is there, or it does not speak as is expected of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server at `http[s]://HOST[:PORT][/PREFIX]`. Requests to it are greedy and streamed. Raises TargetError for another address."""

    url: str
    model: str = ""
    endpoint: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=dict)
    takes_ids: bool = True  # prompts of token ids; else they are text
    gives_ids: bool = True  # the ids of its tokens come with them
    extras: Mapping[str, Any] = field(default_factory=lambda: IDS | ENDLESS)  # fields beyond OpenAI's that it takes
    classes: frozenset[str] = frozenset()  # that it knows: a request of one of them says so

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in PORTS or not parts.hostname:
            raise TargetError(f"the base URL {self.url!r} is not http://HOST:PORT or https://HOST")

    async def connect(self, *, timeout_s: float | None = None) -> Connection:
        """A new connection. Raises OSError."""
        parts = urlsplit(self.url)
        port = parts.port or PORTS[parts.scheme]
        return await connect(parts.hostname or "", port, tls=parts.scheme == "https", timeout_s=timeout_s)

    @property
    def host(self) -> str:
        """As requests name it."""
        return urlsplit(self.url).netloc

    @property
    def is_chat(self) -> bool:
        """It is asked with messages."""
        return self.endpoint.endswith("/chat/completions")

    def path(self, endpoint: str) -> str:
        """Behind the prefix of the address."""
        return urlsplit(self.url).path.rstrip("/") + endpoint

    def ask(self, prompt: Prompt | tuple[str, ...], output_len: int, *, class_name: str = "default") -> bytes:
        """A whole HTTP request."""
        asked: dict[str, Any] = {"prompt": prompt}
        if self.is_chat:
            asked = {"messages": [{"role": ROLES[n % 2], "content": text} for n, text in enumerate(prompt)]}
        body: dict[str, Any] = {
            "model": self.model,
            **asked,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extras,
        }
        encoded = json.dumps(body, separators=(",", ":")).encode()
        of_class = {CLASS_HEADER: class_name} if class_name in self.classes else {}
        return post(self.path(self.endpoint), encoded, host=self.host, headers=self.headers | of_class)

    @property
    def is_like_ours(self) -> bool:
        """Token ids both ways, and answers as long as asked for."""
        return self.takes_ids and self.gives_ids and "ignore_eos" in self.extras

    @property
    def differences(self) -> str:
        """What a reader of the figures must know of how it was asked; empty if nothing."""
        found = []
        if self.is_chat:
            found.append("a chat takes text: prompts are messages, and their tokens are as many as it counts with its template")
        elif not self.takes_ids:
            found.append("it takes no token ids: prompts are sent as text, and their tokens are as many as it counts")
        if not self.gives_ids:
            found.append("it gives no token ids: a time is that of an event, and tokens are as many as it counts")
        if "ignore_eos" not in self.extras:
            found.append("it knows no ignore_eos: answers may be shorter than asked for")
        return "; ".join(found)


async def find_out(target: Target, prompt: Sequence[int], *, decode: Decode | None = None) -> Target:
    """The target with its model's name, if that is not given, and with what it takes. `decode` makes text of ids where it takes none.

    Raises TargetError.
    """
    if target.is_chat and decode is None:
        raise TargetError(f"{target.endpoint} takes text: a tokenizer must make it (--tokenizer SOURCE)")
    try:
        connection = await target.connect(timeout_s=PROBE_S)
    except OSError as error:
        raise TargetError(f"no server answers at {target.url}: {error.strerror or error}") from None
    try:
        if not target.model:
            target = replace(target, model=await _first_model(target, connection))
        kinds: list[tuple[bool, dict[str, Any]]] = []
        if not target.is_chat:
            kinds = [(True, IDS | ENDLESS), (True, ENDLESS), (True, {})]
        if decode is not None:
            kinds += [(False, IDS | ENDLESS), (False, ENDLESS), (False, {})]
        refusal = ""
        for takes_ids, extras in kinds:
            tried = replace(target, takes_ids=takes_ids, extras=extras)
            if connection.transport is None or connection.transport.is_closing():
                connection = await target.connect(timeout_s=PROBE_S)
            words: Prompt | tuple[str, ...] = list(prompt)
            if not takes_ids and decode is not None:
                words = (decode(prompt),) if target.is_chat else decode(prompt)
            record = await send(connection, Ask({}), tried.ask(words, 2), due=time.perf_counter(), timeout_s=PROBE_S)
            if not record.error:
                return replace(tried, gives_ids=_has_ids(record))
            refusal = refusal or record.error
        raise TargetError(f"{target.url}{target.endpoint} does not answer a short request: {refusal}")
    except (OSError, BrokenAnswer) as error:
        raise TargetError(f"{target.url} broke off: {error}") from None
    finally:
        connection.close()


def _has_ids(record: Record) -> bool:
    return any(choice.get("token_ids") for content in record.contents for choice in content.get("choices", ()))


async def _first_model(target: Target, connection: Connection) -> str:
    request = get(target.path("/v1/models"), host=target.host, headers=target.headers)
    try:
        answer = await asyncio.wait_for(connection.ask(request), PROBE_S)
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, TimeoutError):
        raise TargetError(f"{target.url}/v1/models names no model: give one with --model") from None

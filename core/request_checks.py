"""What can never be served is refused at submit, with the numbers, and never queued.

Limits of classes are the scheduler's (`Scheduler.check`), what must be known of a request's length the allocator's
(`Allocator.check_request`); sampling parameters check themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.errors import RequestError
from octavo.core.parameters import LARGEST, shown
from octavo.core.request import Request

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def check_request(request: Request, engine: Engine) -> None:
    """Raises RequestError that names the field."""
    for field, value, kind in (
        ("request_id", request.id, str),
        ("priority", request.priority, int),
        ("class", request.class_name, str),
        ("user", request.user, str),
    ):
        if type(value) is not kind:
            raise RequestError(f"{field} must be {'a whole number' if kind is int else 'text'}, not {shown(value)}", field=field)
    if request.id in engine.requests:
        raise RequestError(f"request id {request.id!r} is in use by an unfinished request", field="request_id")
    if not -LARGEST <= request.priority <= LARGEST:
        raise RequestError(f"priority must be between {-LARGEST} and {LARGEST}, not {shown(request.priority)}", field="priority")
    _check_prompt(request.prompt, engine)
    length, limit, kv = len(request.prompt), engine.max_model_len, engine.kv
    if length + request.max_tokens > limit:
        raise RequestError(
            f"{length} prompt tokens + max_tokens {request.max_tokens} = {length + request.max_tokens} "
            f"exceed max_model_len {limit}: ask for at most {limit - length}",
            field="max_tokens",
        )
    for field in ("min_tokens", "known_output_len"):  # where max_tokens is None, these could not be checked before
        value = getattr(request.params, field)
        if value is not None and value > request.max_tokens:
            raise RequestError(f"{field} is {value}, but only {request.max_tokens} tokens fit the context", field=field)
    if request.params.min_tokens and len(request.stop_ids) >= engine.vocab_size:
        raise RequestError("every token is a stop token, and min_tokens bans them all: nothing could be sampled", field="min_tokens")
    if request.params.structured_outputs is not None and engine.grammars is None:
        raise RequestError("structured_outputs need a tokenizer, and this engine runs on token ids alone", field="structured_outputs")
    if request.stream and request.params.width > request.params.n:
        raise RequestError("best_of above n is known at the end alone: it cannot be streamed", field="best_of")
    engine.scheduler.check(request)
    kv.check_request(request)
    if not kv.fits(request):
        raise RequestError(
            f"the request can never fit the KV pool: {request.width} x ({length} prompt + {request.max_tokens} output tokens), "
            f"the pool has {kv.capacity} slots: ask for fewer tokens or enlarge it (num_kv_slots, kv_cache_memory)",
            field="max_tokens",
        )


def _check_prompt(prompt: tuple[int, ...], engine: Engine) -> None:
    length, limit = len(prompt), engine.max_model_len
    if not length:
        raise RequestError("the prompt is empty: give at least one token", field="prompt")
    strange = next((token for token in prompt if type(token) is not int or not 0 <= token < engine.vocab_size), None)
    if strange is not None:
        raise RequestError(f"prompt token id {shown(strange)} is outside the vocabulary (0..{engine.vocab_size - 1})", field="prompt")
    if length >= limit:
        raise RequestError(f"the prompt has {length} tokens, max_model_len is {limit} and one must be left to answer", field="prompt")

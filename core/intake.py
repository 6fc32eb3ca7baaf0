"""A user's prompt and parameters become a `Request`: what the engine and its model decide is filled in here, once.

The random seed, stop ids, bad words as ids, how much of the prompt counts and how long the answer may be. What cannot be served is told
by `octavo.core.request_checks`. Must not know: schedulers, allocators, torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.options import ClassLimits
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.text.bad_words import resolve_bad_words
from octavo.core.text.stopping import resolve_stop_ids

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def make_request(
    engine: Engine,
    prompt: Seq[int],
    params: SamplingParams | BeamSearchParams,
    *,
    order: int,
    request_id: str | None,
    prompt_text: str | None,
    priority: int | None,
    class_name: str,
    user: str,
    stream: bool,
) -> Request:
    """`order` is the running number of the request. Raises RequestError."""
    beams = params if isinstance(params, BeamSearchParams) else None
    params = params.sampling if isinstance(params, BeamSearchParams) else params
    prompt = _truncated(prompt, params, engine.max_model_len)
    arrival = engine.clock.now()
    limits = engine.scheduler.options.classes.get(class_name, ClassLimits())
    room = engine.max_model_len - len(prompt)
    timeouts = [seconds for seconds in (params.timeout_s, limits.timeout_s) if seconds is not None]
    return Request(
        request_id if request_id is not None else _unused_id(engine, order),
        tuple(prompt),
        params,
        max_tokens=min(room, limits.max_output_tokens or room) if params.max_tokens is None else params.max_tokens,
        seed=params.seed if params.seed is not None else _mix(engine.seed, order),
        stop_ids=resolve_stop_ids(params, eos_token_ids=engine.eos_token_ids, vocab_size=engine.vocab_size),
        bad_words=resolve_bad_words(params.bad_words, tokenizer=engine.tokenizer, vocab_size=engine.vocab_size),
        arrival=arrival,
        deadline=arrival + min(timeouts) if timeouts else None,
        order=order,
        priority=params.priority if priority is None else priority,
        class_name=class_name,
        user=user,
        beams=beams,
        stream=stream,
        prompt_text=prompt_text,
    )


def _truncated(prompt: Seq[int], params: SamplingParams, max_model_len: int) -> Seq[int]:
    """The prompt's last tokens, where the request asks for no more."""
    keep = params.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, max_model_len - (params.max_tokens or 1))
    return prompt if keep is None else prompt[-keep:]


def _unused_id(engine: Engine, order: int) -> str:
    """A name for a request that brought none; callers' own names may look alike."""
    return next(name for n in itertools.count(order) if (name := f"request-{n}") not in engine.requests)


def _mix(seed: int, order: int) -> int:
    """A request's own seed where it gave none: the engine's and its running number, well mixed (SplitMix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + (order + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & 0x7FFFFFFFFFFFFFFF

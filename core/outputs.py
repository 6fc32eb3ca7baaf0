"""What comes out of the engine: answers for users, a report of each step for observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.core.beam_search import rank_of
from octavo.core.kv import BlockEvent, KVStats, KVUsage
from octavo.core.logprobs import Logprob, readable
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt. For a streaming request: what is new of it since the last output."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort", "timeout" or "error"; None: goes on
    stop_reason: int | str | None = None  # the stop id or stop string that was met; None for EOS
    cumulative_logprob: float | None = None  # sum of the tokens' log probabilities: of beams, and where logprobs were asked for
    score: float | None = None  # of beams: what they are ranked by, the same divided by length ** length_penalty
    logprobs: list[dict[int, Logprob]] | None = None  # of each token: its own and the likeliest ones', by id
    error: str | None = None  # what went wrong, where finish_reason is "error"

    @property
    def finished(self) -> bool:
        """No more will come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds on the engine's clock; None: did not get that far."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float | None


@dataclass(slots=True)
class RequestOutput:
    """The answer to a request: whole once it is finished, or (`stream`) a piece of it after each step.

    Pieces carry no prompt ids and no times; the last piece of a request has `finished` set.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """None for the first token. On the first piece of a stream. As far as it came, where the request ended before its first token."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in a prefix cache
    num_preemptions: int = 0
    times: RequestTimes | None = None
    class_name: str = "default"
    user: str = ""
    params: SamplingParams | None = None  # what was asked for; on whole answers


Decode = Callable[[int], str] | None
"""Makes a token's text, where there is a tokenizer."""


def streamed(sequence: Sequence, token_ids: list[int], text: str, *, reason: str | None, decode: Decode) -> RequestOutput:
    """A piece of an answer: what one step added to one sequence."""
    request = sequence.request
    wanted = request.params.logprobs is not None
    piece = CompletionOutput(
        sequence.sample_index,
        text,
        token_ids,
        reason,
        _stop_reason(sequence) if reason else None,
        cumulative_logprob=sequence.score if wanted else None,
        logprobs=[readable(entry, decode) for entry in sequence.logprobs[len(sequence.output) - len(token_ids) :]] if wanted else None,
        error=sequence.error,
    )
    first = sequence.sample_index == 0 and len(sequence.output) == len(token_ids)
    return RequestOutput(
        request.id,
        request.prompt_text,
        [],
        [piece],
        finished=False,
        prompt_logprobs=_prompt_logprobs(request, decode) if first else None,
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=request.num_cached or 0,
        num_preemptions=request.num_preemptions,
        class_name=request.class_name,
        user=request.user,
    )


def _prompt_logprobs(request: Request, decode: Decode) -> list[dict[int, Logprob] | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    return [None, *(readable(entry, decode) for entry in request.prompt_logprobs)]


def _stop_reason(sequence: Sequence) -> int | str | None:
    """The stop string or stop id that ended it; None for an EOS, which everybody expects."""
    reason = sequence.text.stop_reason if sequence.text is not None else None
    return None if isinstance(reason, int) and reason not in sequence.request.params.stop_token_ids else reason


def completed(request: Request, *, finished_at: float, decode: Decode) -> RequestOutput:
    """The whole answer of a request that is over: samples in their order, of `best_of` the best, beams from the best."""
    params, beams, sequences = request.params, request.beams, request.finished
    if request.beam_width:
        sequences = sorted(sequences, key=rank_of)[: request.beam_width]
    elif params.width > params.n:
        sequences = sorted(sequences, key=lambda s: (-s.score, s.sample_index))[: params.n]
    else:
        sequences = sorted(sequences, key=lambda s: s.sample_index)
    outputs = [
        CompletionOutput(
            number,
            sequence.text.text if sequence.text is not None else "",
            list(sequence.output),
            sequence.finish_reason,
            _stop_reason(sequence),
            cumulative_logprob=sequence.score if request.beam_width or params.num_logprobs is not None else None,
            score=None if beams is None else beams.score(sequence.score, len(sequence.output)),
            logprobs=None if params.logprobs is None else [readable(entry, decode) for entry in sequence.logprobs],
            error=sequence.error,
        )
        for number, sequence in enumerate(sequences)
    ]
    return RequestOutput(
        request.id,
        request.prompt_text,
        list(request.prompt),
        outputs,
        finished=True,
        prompt_logprobs=_prompt_logprobs(request, decode),
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=request.num_cached or 0,
        num_preemptions=request.num_preemptions,
        times=RequestTimes(request.arrival, request.first_scheduled, request.first_token, finished_at),
        class_name=request.class_name,
        user=request.user,
        params=request.params,
    )


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step in numbers."""

    step: int
    time: float  # at the start, on the engine's clock
    end: float  # when its result was applied
    num_waiting: int
    num_running: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_recomputed: int  # tokens that were computed before, and lost in a preemption
    num_drafted: int  # tokens guessed by speculative decoding and checked
    num_accepted: int  # of these, tokens that the model would have chosen itself
    idle_rows: int
    num_preempted: int
    num_failed: int
    transfers: dict[str, int]  # slots moved, by kind
    usage: KVUsage  # when it was over
    usage_running: KVUsage  # while it ran: planned, and nothing written yet
    stats: KVStats
    events: tuple[BlockEvent, ...]  # blocks that changed hands since the last report, where `Allocator.observed` is set
    num_events_planned: int  # the first of these happened before it ran, the others when its result was applied
    seconds: dict[str, float] = field(default_factory=dict)  # schedule, inputs, forward, sample, apply
    starts: tuple[int, ...] = ()  # of each row, its first position in this step
    lengths: tuple[int, ...] = ()  # and how many tokens of it run
    first_tokens: tuple[float, ...] = ()  # seconds from arrival, of requests whose first token came
    token_gaps: dict[float, int] = field(default_factory=dict)  # seconds since the tokens before: sequences that waited so long
    error: str = ""  # why it was undone: nothing came of it

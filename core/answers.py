"""`Answers`: sampled tokens become text, and text the outputs that an engine hands out, in pieces or whole.

One for an engine. Must not know: plans, schedulers, allocators, when a request ends for other reasons than its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from octavo.core.errors import PluginContractError
from octavo.core.grammar.compiler import GrammarError
from octavo.core.logprobs import TokenLogprobs
from octavo.core.outputs import RequestOutput, completed, streamed
from octavo.core.request import Request, Sequence
from octavo.core.text.output_text import OutputText
from octavo.core.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")


class Answers:
    """The texts of all live sequences, and the outputs that are ready to be handed out."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decode = None if tokenizer is None else tokenizer.decode_token
        self._ready: list[RequestOutput] = []
        self.num_tokens = 0  # of all outputs so far; of beams, those of ended searches

    def __len__(self) -> int:
        """Outputs that nobody has taken yet."""
        return len(self._ready)

    def drain(self) -> list[RequestOutput]:
        """What became ready since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def discard(self, request_id: str) -> None:
        """Nobody will ask for what came out for this request."""
        self._ready = [output for output in self._ready if output.request_id != request_id]

    def begin(self, sequence: Sequence) -> None:
        """The sequence has no output yet. Raises RequestError where its parameters need a tokenizer and there is none."""
        request = sequence.request
        sequence.text = OutputText(self._tokenizer, params=request.params, stop_ids=request.stop_ids, max_tokens=request.max_tokens)

    def append(self, sequence: Sequence, tokens: Seq[int], scored: Seq[TokenLogprobs]) -> str | None:
        """Take sampled tokens, and their log probabilities if asked for, up to the one that ends the sequence; returns why it ends."""
        text = sequence.text
        if text is None:
            raise PluginContractError(f"sequence {sequence.id!r} takes no sampled tokens")
        reason: str | None
        try:
            delta, reason, kept = text.push(tokens)
        except Exception as error:  # one request's text, nobody else's business
            logger.exception("request %r: its tokens cannot be turned into text", sequence.request.id)
            sequence.error = f"its tokens cannot be turned into text: {error}"
            delta, reason, kept = "", "error", len(tokens)
        fresh = tokens if kept == len(tokens) else tokens[:kept]
        if sequence.grammar is not None and reason in (None, "length"):
            try:
                if sequence.grammar.accept(fresh):  # complete: nothing more could come
                    delta, reason = delta + text.finish(), "stop"
            except GrammarError as error:
                sequence.error = f"structured_outputs: {error}"
                delta, reason = delta + text.finish(), "error"
        sequence.output += fresh
        self.num_tokens += len(fresh)
        if scored:
            sequence.logprobs += scored[:kept]
            sequence.score += sum(entry.logprob for entry in scored[:kept])
        if sequence.request.stream:
            self._ready.append(streamed(sequence, list(fresh), delta, reason=reason, decode=self._decode))
        return reason

    def cut_short(self, sequence: Sequence, reason: str) -> None:
        """The sequence ended for a reason from outside: what its text held back comes out."""
        tail = sequence.text.finish() if sequence.text is not None else ""
        if sequence.request.stream and not sequence.request.beam_width:
            self._ready.append(streamed(sequence, [], tail, reason=reason, decode=self._decode))

    def complete(self, request: Request, *, finished_at: float) -> RequestOutput:
        """The whole answer of a request that is over. It is handed out, or with a stream marks the last piece."""
        if request.beam_width:
            for sequence in request.finished:
                self.begin(sequence)
                if sequence.text is not None:
                    sequence.text.push(sequence.output)
                    sequence.text.finish()
        answer = completed(request, finished_at=finished_at, decode=self._decode)
        if request.beam_width:
            self.num_tokens += sum(len(output.token_ids) for output in answer.outputs)
        if not request.stream or request.beam_width:
            self._ready.append(answer)  # beams have no pieces: which of them wins is known at the end
        else:
            self._ready[-1].finished = True
            self._ready[-1].times = answer.times
        return answer

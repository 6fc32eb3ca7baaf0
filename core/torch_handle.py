"""`TorchHandle`: a step in flight on a device, and what is made of it on the host when it is over.

Must not know: models, kernels, how tokens are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence as Seq

import torch

from octavo.core.beam_search import Candidate
from octavo.core.clock import Clock
from octavo.core.execution import StepResult
from octavo.core.fetching import fetch
from octavo.core.grammar.masks import Masks
from octavo.core.logprobs import TokenLogprobs
from octavo.core.out_of_memory import translated
from octavo.core.plan import BatchPlan
from octavo.core.sampler import NOT_FINITE, NOTHING_LEFT, Candidates
from octavo.core.scored_rows import ScoredRows
from octavo.core.scoring import Scores

NO_FINITE_LOGITS = "the model gave no finite logits: its weights or this request's KV hold NaN or infinity"
NO_FINITE_RESULT = "logits_processors returned NaN or infinity, or the model gave it: no token can be chosen"
ALL_BANNED = (
    "no token is left to sample: allowed_token_ids, bad_words, logit_bias, logits_processors, a structured output and, before min_tokens, "
    "the stop tokens together ban all"
)


class TorchHandle:
    """A step in flight: tensors that the device may still be working on."""

    def __init__(self, plan: BatchPlan, clock: Clock) -> None:
        self.transfers_done = 0
        self.error: BaseException | None = None
        self.tokens: torch.Tensor | None = None  # [N] drawn ids
        self.draws: list[int] = []  # [chunks] how many of them are each chunk's
        self.candidates: Candidates | None = None
        self.drawn: tuple[ScoredRows, Scores] | None = None  # of draws whose log probabilities are asked for
        self.prompts: tuple[ScoredRows, Scores] | None = None
        self.errors: dict[int, str] = {}  # of chunks that are known to have no result
        self.masks: Masks | None = None
        self.seconds: dict[str, float] = {}
        self._plan = plan
        self._clock = clock

    def result(self) -> StepResult:
        """Wait for the device, once, and deal the drawn ids out to the chunks. A negative one is an error of its request."""
        if self.error is not None:
            raise self.error
        begun = self._clock.now()
        try:
            self._fetch()
        except Exception as error:
            raise translated(error) from None
        drawn: list[int] = [] if self.tokens is None else self.tokens.tolist()
        self.seconds["sample"] = self.seconds.get("sample", 0.0) + self._clock.now() - begun
        tokens: list[Seq[int]] = []
        candidates, (ended, errors) = self._candidates(), self._by_chunk()
        logprobs, prompt_logprobs = _deal(self.drawn), _deal(self.prompts)
        at = 0
        for index, (chunk, count) in enumerate(zip(self._plan.chunks, self.draws, strict=True)):
            mine = drawn[at : at + count]
            at += count
            if index in ended:
                mine = []
            elif NOT_FINITE in mine or (index in candidates and math.isnan(candidates[index][0][1])):
                errors.setdefault(index, NO_FINITE_RESULT if chunk.sequence.request.params.logits_processors else NO_FINITE_LOGITS)
            elif NOTHING_LEFT in mine:
                errors.setdefault(index, ALL_BANNED)
            tokens.append(mine[: accepted(chunk.drafts, mine) + 1] if chunk.drafts else mine)
            if chunk.drafts and index in logprobs:
                del logprobs[index][len(tokens[-1]) :]
        errors.update(
            (index, NO_FINITE_LOGITS)
            for scored in (logprobs, prompt_logprobs)
            for index, entries in scored.items()
            if any(math.isnan(entry.logprob) for entry in entries)
        )
        return StepResult(tokens, candidates, logprobs, prompt_logprobs, ended, errors, self.seconds)

    def _fetch(self) -> None:
        """Bring all that the device made here, in one transfer."""
        scored = [scores[:-1] for _, scores in filter(None, (self.drawn, self.prompts))]
        groups = [() if self.tokens is None else (self.tokens,), () if self.candidates is None else self.candidates[1:], *scored]
        host = iter(fetch([tensor for group in groups for tensor in group]))
        if self.tokens is not None:
            self.tokens = next(host)
        if self.candidates is not None:
            self.candidates = Candidates(self.candidates.rows, next(host), next(host))
        self.drawn, self.prompts = (_with_scores(scored, host) for scored in (self.drawn, self.prompts))

    def _by_chunk(self) -> tuple[set[int], dict[int, str]]:
        """Chunks whose output is complete as it is, and those that are known to have no result, and why."""
        if self.masks is None:
            return set(), dict(self.errors)
        owners = [index for index, chunk in enumerate(self._plan.chunks) for _ in range(chunk.sampled_from, chunk.stop)]
        return {owners[row] for row in self.masks.ended}, self.errors | {owners[row]: error for row, error in self.masks.errors.items()}

    def _candidates(self) -> dict[int, list[Candidate]]:
        """The best tokens of each chunk of beams, by the chunk's index; such a chunk has one row of logits."""
        if self.candidates is None:
            return {}
        beams = [index for index, chunk in enumerate(self._plan.chunks) if chunk.samples and chunk.sequence.request.beam_width]
        ids, log_probs = self.candidates.token_ids.tolist(), self.candidates.log_probs.tolist()
        return {index: list(zip(*row, strict=True)) for index, *row in zip(beams, ids, log_probs, strict=True)}


def _with_scores(scored: tuple[ScoredRows, Scores] | None, tensors: Iterator[torch.Tensor]) -> tuple[ScoredRows, Scores] | None:
    """The same scores, in the next of these tensors."""
    if scored is None:
        return None
    rows, scores = scored
    token_ids, logprobs, ranks, top_ids, top_logprobs = itertools.islice(tensors, 5)
    return rows, Scores(token_ids, logprobs, ranks, top_ids, top_logprobs, scores.num_top)


def _deal(scored: tuple[ScoredRows, Scores] | None) -> dict[int, list[TokenLogprobs]]:
    """Scores by the index of the chunk that they are of."""
    if scored is None:
        return {}
    rows, scores = scored
    entries = iter(scores.entries())
    return {index: list(itertools.islice(entries, count)) for index, count in rows.counts.items()}


def accepted(drafts: Seq[int], drawn: Seq[int]) -> int:
    """How many drafts were guessed right: draws are functions of seed, sample and position, so equality is all there is to check."""
    return next((i for i, (draft, token) in enumerate(zip(drafts, drawn, strict=False)) if draft != token), len(drafts))

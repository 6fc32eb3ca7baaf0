"""Teacher forcing: what a model makes of tokens that somebody else chose, each in its place after those before.

Must not know: ablations, stacks, who chose the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.core.engine import Engine
from octavo.core.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the tokens of one answer."""

    distances: list[float]  # by how much each one's logit is below the largest; 0: greedy would have chosen it
    logprobs: list[float]


def score(
    engine: Engine, answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, progress: Callable[[], object] = lambda: None
) -> list[Scores]:
    """Score answers: of each, the prompt's ids and the answer's. One token at the end of a full context is left out.

    Raises RequestError where a prompt and its answer do not fit, EngineError where the engine fails.
    """
    found: dict[str, Scores] = {}
    for number, (prompt, answer) in enumerate(answers):
        tokens = [*prompt, *answer][: engine.max_model_len - 1]
        engine.add_request(tokens, PARAMS, request_id=str(number))
    while engine.has_work:
        for output in engine.step():
            if not output.finished:
                continue
            prompt, _ = answers[int(output.request_id)]
            entries = (output.prompt_logprobs or [])[len(prompt) :]
            tokens = output.prompt_token_ids[len(prompt) :]
            pairs = [(entry, token) for entry, token in zip(entries, tokens, strict=True) if entry is not None]
            found[output.request_id] = Scores(
                [max(candidate.logprob for candidate in entry.values()) - entry[token].logprob for entry, token in pairs],
                [entry[token].logprob for entry, token in pairs],
            )
            progress()
    return [found[str(number)] for number in range(len(answers))]


def perplexity(scores: Iterable[Scores]) -> float:
    """exp of the mean negative log probability of all their tokens; NaN without any."""
    logprobs = [value for one in scores for value in one.logprobs]
    return math.exp(-sum(logprobs) / len(logprobs)) if logprobs else math.nan

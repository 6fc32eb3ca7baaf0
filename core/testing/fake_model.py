"""A language model in a few lines of arithmetic: its next token depends on the whole prefix, so a wrong slot changes everything.

`decode_alone` answers a request by itself, without engine, scheduler or cache: what every stack must give. It shares with the
fake runner only the model below, and with the engine nothing but the data types. Must not know: torch, allocators, schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.core.beam_search import Candidate
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.logprobs import TokenLogprobs
from octavo.core.request import Request

VOCAB_SIZE = 5
EOS = 0


def prefix_hash(previous: int, token: int) -> int:
    """Hash of a prefix one token longer. Tuples of ints hash alike in every process."""
    return hash((previous, token, 7))


def hash_of(tokens: Seq[int]) -> int:
    """Hash of a whole prefix."""
    prefix = 0
    for token in tokens:
        prefix = prefix_hash(prefix, token)
    return prefix


def draw(prefix: int, *, seed: int, sample_index: int, banned: frozenset[int] = frozenset()) -> int:
    """The token sampled after a prefix: EOS once in some 29 times, never a banned one (stop ids before `min_tokens`)."""
    for attempt in range(1000):
        number = hash((prefix, seed, sample_index, attempt))
        token = EOS if (number >> 9) % 29 == 0 else 1 + (number >> 3) % (VOCAB_SIZE - 1)
        if token not in banned:
            return token
    raise ValueError(f"all tokens are banned: {sorted(banned)}")


def best_candidates(prefix: int, count: int) -> list[Candidate]:
    """The likeliest `count` tokens after a prefix with their log probabilities, whole numbers so that sums are exact."""
    return _by_likelihood(prefix)[:count]


def _by_likelihood(prefix: int) -> list[Candidate]:
    scored = [(token, -float((hash((prefix, token, 31)) >> 5) % 1009)) for token in range(VOCAB_SIZE)]
    return sorted(scored, key=lambda candidate: (-candidate[1], candidate[0]))


def score(prefix: int, token: int, num_top: int) -> TokenLogprobs:
    """The log probability of a token after a prefix, and those of the likeliest ones."""
    ranking = _by_likelihood(prefix)
    value = dict(ranking)[token]
    return TokenLogprobs(token, value, 1 + sum(other > value for _, other in ranking), tuple(ranking[:num_top]))


def decode_alone(request: Request) -> list[tuple[list[int], str]]:
    """What this request is answered with: (token ids, finish reason) of each output, samples in order, beams from the best.

    Of more samples than it gives (`best_of`), those whose log probabilities have the greatest sums, the best first.
    """
    if request.beams is not None:
        return _search_beams(request, request.beams)
    samples = [sample_alone(request, index) for index in range(request.width)]
    if request.width > request.params.n:
        samples.sort(key=lambda sample: -sum(entry.logprob for entry in score_alone(request, sample[0], 0)))
    return samples[: request.params.n]


def score_alone(request: Request, output: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities of the tokens of an output after this request's prompt."""
    return score_tokens([*request.prompt, *output], num_top)[len(request.prompt) - 1 :]


def score_tokens(tokens: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities of all tokens but the first."""
    return [score(hash_of(tokens[:position]), tokens[position], num_top) for position in range(1, len(tokens))]


def sample_alone(request: Request, index: int) -> tuple[list[int], str]:
    """One of its samples, and why it ends."""
    output: list[int] = []
    prefix = hash_of(request.prompt)
    while True:
        banned = request.stop_ids if len(output) < request.params.min_tokens else frozenset[int]()
        output.append(draw(prefix, seed=request.seed, sample_index=index, banned=banned))
        if output[-1] in request.stop_ids and output[-1] not in banned:
            return output, "stop"
        if len(output) == request.max_tokens:
            return output, "length"
        prefix = prefix_hash(prefix, output[-1])


def _search_beams(request: Request, params: BeamSearchParams) -> list[tuple[list[int], str]]:
    """Written down as plainly as can be: in each step all continuations by all tokens, in order."""
    width = params.beam_width
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[float, list[int]]] = []  # minus what it is worth, and the output: the best sorts first
    for length in range(1, request.max_tokens + 1):
        grown = [
            ([*output, token], total + log_prob)
            for output, total in live
            for token, log_prob in best_candidates(hash_of([*request.prompt, *output]), VOCAB_SIZE)
        ]
        grown.sort(key=lambda hypothesis: (-hypothesis[1], hypothesis[0]))
        over = {tuple(output) for output, _ in grown if output[-1] in request.stop_ids or length == request.max_tokens}
        ended += [(-total / length**params.length_penalty, output) for output, total in grown[:width] if tuple(output) in over]
        ended = sorted(ended)[:width]
        live = [(output, total) for output, total in grown if tuple(output) not in over][:width]
        if len(ended) == width and live:
            reach = request.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
            if params.early_stopping is True or width == 1 or live[0][1] / reach**params.length_penalty <= -ended[-1][0]:
                break
    return [(output, "stop" if output[-1] in request.stop_ids else "length") for _, output in ended]

"""A language model in a few lines of arithmetic: its next token depends on the whole prefix, so a wrong slot changes everything.

`decode_alone` answers a request by itself, without engine, scheduler or cache: what every stack must give. It shares with the
fake runner only the model below, and with the engine nothing but the data types. Must not know: torch, allocators, schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.core.forks import Candidate
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


def best_candidates(prefix: int, width: int) -> list[Candidate]:
    """The likeliest 2 x `width` tokens after a prefix with their log probabilities, whole numbers so that sums are exact."""
    return _by_likelihood(prefix)[: 2 * width]


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
    if request.beam_width:
        return _search_beams(request)
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


def _search_beams(request: Request) -> list[tuple[list[int], str]]:
    width = request.beam_width
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float, str]] = []
    while live and len(ended) < width:
        if len(live[0][0]) == request.max_tokens:
            ended += [(output, score, "length") for output, score in live]
            break
        grown = [
            ([*output, token], score + logprob)
            for output, score in live
            for token, logprob in best_candidates(hash_of([*request.prompt, *output]), width)
        ]
        grown.sort(key=lambda hypothesis: (-hypothesis[1], hypothesis[0]))
        live = []
        for output, score in grown:
            if len(live) == width:
                break
            if output[-1] in request.stop_ids:
                ended.append((output, score, "stop"))
            else:
                live.append((output, score))
    ended.sort(key=lambda hypothesis: (-hypothesis[1], hypothesis[0]))
    return [(output, reason) for output, _, reason in ended[:width]]

"""What a user sends (`Request`) and the rows of tokens that answer it (`Sequence`).

A scheduler sees requests; an allocator and the input builder see sequences. Neither says where KV lies: only the allocator knows.
There is no prefill or decode phase: a sequence knows how many of its positions are computed and planned, and what can run next
follows from that (`num_next`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.logprobs import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.core.sampling_settings import RowSettings

if TYPE_CHECKING:
    from octavo.core.grammar.compiler import Matcher
    from octavo.core.plan import Chunk
    from octavo.core.text.output_text import OutputText
    from octavo.core.token_counts import TokenCounts


class Status(Enum):
    """Where a sequence's KV is."""

    NEW = "new"  # nowhere: never admitted, or preempted and to be computed again
    OPEN = "open"  # in the pool
    SUSPENDED = "suspended"  # in host memory
    DONE = "done"  # given back, or kept by the policy until it lets go


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One row of tokens and its progress. Owned and changed by the engine, the scheduler base and the plan builder.

    `num_computed` positions have their KV written (results applied); `num_scheduled` are written once all steps in flight are done.
    `epoch` rises when the sequence is preempted or ends, so that a result of an older epoch can be told and dropped.
    `awaited` is a chunk in flight whose result decides what runs next; until it is applied, the whole request sits out.
    """

    id: str
    request: Request
    sample_index: int = 0
    output: list[int] = field(default_factory=list)
    score: float = 0.0  # sum of log probabilities, where they are known (beams, logprobs, best_of)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of `output`, where they were asked for
    num_computed: int = 0
    num_scheduled: int = 0
    num_reached: int = 0  # most positions that were computed before a preemption: up to here it computes again
    status: Status = Status.NEW
    epoch: int = 0
    awaited: Chunk | None = None
    finish_reason: str | None = None
    error: str | None = None  # what went wrong, where finish_reason is "error"
    last_token: float | None = None  # when its newest token came, on the engine's clock
    text: OutputText | None = None  # turns ids into text, keeps it, and says when to stop
    counts: TokenCounts | None = None  # of `output`, where penalties need them
    grammar: Matcher | None = None  # what `output` must follow, as far as it has come; it advances with `output` and with nothing else
    prompt_len: int = field(init=False)
    max_positions: int = field(init=False)  # positions whose KV is ever written: the last token's is not

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt)
        self.max_positions = self.prompt_len + self.request.max_tokens - 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose ids are known."""
        return self.prompt_len + len(self.output)

    @property
    def num_next(self) -> int:
        """Tokens that can run now: min(max(num_tokens, num_scheduled + 1), max_positions) - num_scheduled.

        A sampled token still in flight counts: its id is filled in on the device. Written out, since every row asks in every step.
        """
        start, stop = self.num_scheduled, self.prompt_len + len(self.output)
        if stop <= start:
            stop = start + 1
        if stop > self.max_positions:
            stop = self.max_positions
        return stop - start

    @property
    def known_output_len(self) -> int | None:
        """Output tokens that will come, where a replay of recorded traffic knows."""
        return self.request.params.known_output_len

    def tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Known ids of positions start .. stop - 1."""
        n = self.prompt_len
        if stop is None:
            stop = n + len(self.output)
        if start >= n:
            return self.output[start - n : stop - n]
        prompt = self.request.prompt
        if stop <= n:
            return list(prompt[start:stop])
        return [*prompt[start:], *self.output[: stop - n]]

    def new_epoch(self, status: Status) -> None:
        """Forget all progress; results in flight are void from now on."""
        self.epoch += 1
        self.num_reached = max(self.num_reached, self.num_computed)
        self.num_computed = self.num_scheduled = 0
        self.awaited = None
        self.status = status


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """What a user sends and a scheduler sees: one prompt and the 1..width sequences that continue it.

    `order` is the running number of its arrival and breaks ties. `rank` is set by the scheduler when the request is added.
    `restore`: after a preemption by recompute, its first sequence computes this many positions, then the others fork from it.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of the params' texts
    arrival: float = 0.0
    deadline: float | None = None  # when it is ended with what it has, on the engine's clock
    order: int = 0
    priority: int = 0
    class_name: str = "default"
    user: str = ""
    beams: BeamSearchParams | None = None  # how it searches, instead of sampling
    stream: bool = False
    prompt_text: str | None = None
    rank: tuple[float, int] = (0.0, 0)
    running: bool = False
    forked: bool = False
    restore: int | None = None
    sequences: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt from its second token on, as far as known
    num_cached: int | None = None  # prompt tokens found in a prefix cache when first admitted
    num_preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    beam_width: int = field(init=False)  # 0: no search
    width: int = field(init=False)  # sequences it may have at once
    reads_output: bool = field(init=False)  # see SamplingParams
    prompt_scored: bool = field(init=False)  # all log probabilities of its prompt that are wanted are there
    sampling: RowSettings = field(init=False)  # how its tokens are drawn
    takes_likeliest: bool = field(init=False)  # each token is the argmax of the model's own logits, which nobody wants to see

    def __post_init__(self) -> None:
        self.beam_width = self.beams.beam_width if self.beams is not None else 0
        self.width = max(self.params.width, self.beam_width)
        self.reads_output = self.params.reads_output
        self.takes_likeliest = self.params.takes_likeliest and not self.beam_width
        self.prompt_scored = self.params.prompt_logprobs is None or len(self.prompt) == 1
        self.sampling = RowSettings.of(self.params, seed=self.seed, stop_ids=self.stop_ids, bad_words=self.bad_words)
        self.sequences.append(Sequence(f"{self.id}/0", self))

    @property
    def cache_key(self) -> tuple[tuple[str, str], ...]:
        """Besides the token ids, what must agree for KV to be shared, as (kind, value): a salt (an adapter, later)."""
        return (("salt", self.params.cache_salt),) if self.params.cache_salt else ()

    def score_prompt(self, entries: Seq[TokenLogprobs]) -> None:
        """Take the log probabilities of the next tokens of the prompt."""
        self.prompt_logprobs += entries
        self.prompt_scored = len(self.prompt_logprobs) == len(self.prompt) - 1

    @property
    def reads_cache(self) -> bool:
        """A prefix cache may be asked: not while the logits of every position of the prompt are still wanted."""
        return self.prompt_scored

    @property
    def seats(self) -> int:
        """Rows that it may still need at once; limits, admission and preemption count these."""
        return len(self.sequences) if self.forked and not self.beam_width else self.width

    @property
    def samples_jointly(self) -> bool:
        """Its next tokens concern all its sequences: beams always, n samples until they have parted."""
        return bool(self.beam_width) or (self.width > 1 and not self.forked)

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that its search must see of each beam: `beam_width` that go on, after as many as may end."""
        return self.beam_width + len(self.stop_ids) if self.beam_width else 0

    @property
    def runnable(self) -> list[Sequence]:
        """The sequences that can be planned: while it recovers from a preemption, the first alone."""
        return self.sequences if self.restore is None else self.sequences[:1]

    @property
    def prefilling(self) -> bool:
        """More than one token of some sequence can run now. A loop, since a policy may ask every row in every step."""
        for sequence in self.runnable:  # noqa: SIM110
            if sequence.num_next > 1:
                return True
        return False

"""Random workloads through an engine with the fake runner: whatever the stack, the answers are those of unbatched decoding.

After each step the invariants of allocator and scheduler are checked, at the end nothing is held. A run is a function of its
`Case`: whatever fails can be replayed from what the error prints. Must not know: any plugin; who calls brings the stack.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Literal

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.clock import ManualClock
from octavo.core.engine import Engine
from octavo.core.errors import RequestError
from octavo.core.kv import Allocator
from octavo.core.logprobs import readable
from octavo.core.options import ClassLimits
from octavo.core.outputs import RequestOutput, StepReport
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduling import Scheduler
from octavo.core.speculation import PromptLookup
from octavo.core.testing.fake_model import EOS, VOCAB_SIZE, decode_alone, sample_alone, score_alone, score_tokens
from octavo.core.testing.fake_runner import FailurePoint, FakeRunner, InjectedFailure

MAX_MODEL_LEN = 40
MAX_NUM_SEQS = 6
CLASSES = {"b": ClassLimits(max_running=3)}
KINDS = ("plain", "n", "beams", "drafts", "aborts", "all")
"""What occurs besides plain requests."""
MAX_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Case:
    """One run, reproducible: `scheduler` and `allocator` are names that the caller resolves."""

    scheduler: str
    allocator: str
    ample: bool
    preemption: Literal["recompute", "swap"]
    depth: int
    kind: str
    failures: bool  # steps fail now and then
    seed: int


@dataclass(slots=True)
class RunStats:
    """What occurred in runs, so that a test can see that its case did."""

    counts: Counter[str] = field(default_factory=Counter)


MakeStack = Callable[[Case], tuple[Scheduler, Allocator]]


def draw_case(number: int, *, schedulers: Seq[str], allocators: Seq[str]) -> Case:
    """The case of that number, the same for ever."""
    rng = random.Random(number)
    return Case(
        scheduler=rng.choice(schedulers),
        allocator=rng.choice(allocators),
        ample=rng.random() < 0.3,
        preemption=rng.choice(("recompute", "swap")),
        depth=rng.choice((1, 2, 3)),
        kind=rng.choice(KINDS),
        failures=rng.random() < 0.4,
        seed=number,
    )


def look_up(tokens: Seq[int], *, num_tokens: int, longest: int, shortest: int) -> list[int]:
    """What `PromptLookup` must propose after these tokens, found by looking through all of them."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(tokens[len(tokens) - n :]):
                text = list(tokens)
                for index in range(end, end + num_tokens):
                    text.append(text[index])
                return text[len(tokens) :]
    return []


class CheckedLookup(PromptLookup):
    """Prompt lookup that compares each of its guesses with those of a plain search. Raises AssertionError."""

    def __call__(self, sequence: Sequence) -> list[int]:
        """What both propose."""
        found, tokens = super().__call__(sequence), sequence.tokens()
        expected = look_up(tokens, num_tokens=self.num_tokens, longest=self._lengths[0], shortest=self._lengths[-1])
        if found != expected:
            raise AssertionError(f"{sequence.id}: {found} is proposed after {tokens} instead of {expected}")
        return found


def run(case: Case, make_stack: MakeStack) -> RunStats:
    """Run one case to its end; raises AssertionError with the case in it."""
    try:
        return _Run(case, make_stack).to_its_end()
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nin {case}") from error


class _Run:
    def __init__(self, case: Case, make_stack: MakeStack) -> None:
        self.case = case
        self.rng = random.Random(case.seed)
        self.resets = random.Random(-1 - case.seed)  # of what is cached; apart, so that they change nothing else
        self.timeouts = random.Random(f"timeouts of {case.seed}")
        self.wants = random.Random(-1_000_003 - case.seed)  # log probabilities
        self.stats = RunStats()
        scheduler, self.kv = make_stack(case)
        if case.kind in ("drafts", "all"):
            scheduler.proposer = CheckedLookup(num_tokens=3, longest=1 + case.seed % 3, shortest=1)
        failures = {step: self.rng.choice(list(FailurePoint)) for step in range(300) if case.failures and self.rng.random() < 0.08}
        self.runner = FakeRunner(self.kv, eager=self.rng.random() < 0.5, failures=failures)
        self.clock = ManualClock()
        self.engine = Engine(
            scheduler=scheduler,
            kv=self.kv,
            runner=self.runner,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            clock=self.clock,
            seed=case.seed,
            depth=case.depth,
            debug=True,
        )
        self.engine.observers.add(self)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.ended: dict[str, RequestOutput] = {}  # as observers were told
        self.aborted: set[str] = set()  # or timed out
        self.pending = [f"r{number}" for number in range(14)]
        self.common = [self.rng.randrange(1, 4) for _ in range(MAX_MODEL_LEN)]
        self.barren = 0

    # told by the engine
    def octavo_step_finished(self, report: StepReport) -> None:
        self.barren = 0 if report.num_rows else self.barren
        self.stats.counts.update(tokens=report.num_tokens, preempted=report.num_preempted, failed=report.num_failed)
        self.stats.counts.update(report.transfers)

    def octavo_request_finished(self, output: RequestOutput) -> None:
        if output.request_id in self.ended:
            raise AssertionError(f"{output.request_id} ended twice")
        self.ended[output.request_id] = output
        if any(one.finish_reason == "timeout" for one in output.outputs):
            request = self.requests[output.request_id]
            if request.deadline is None or self.clock.now() < request.deadline:
                raise AssertionError(f"{request.id} timed out at {self.clock.now()}, its deadline is {request.deadline}")
            self.aborted.add(request.id)
            self.stats.counts["timed out"] += 1

    def to_its_end(self) -> RunStats:
        engine, rng, arrives = self.engine, self.rng, (0.35, 0.8)[self.case.seed % 2]
        while self.pending or engine.has_work:
            while self.pending and (rng.random() < arrives or not engine.has_work):
                self._add(self.pending.pop(0))
            self._abort_some()
            if self.resets.random() < 0.02:
                self.kv.reset()
            self._step()
        self._check_end()
        self.stats.counts["runs"] += 1
        self.stats.counts.update(asdict(self.kv.stats()))
        self.stats.counts["placeholders"] += self.runner.stats.placeholders
        return self.stats

    def _add(self, request_id: str) -> None:
        rng, kind = self.rng, self.case.kind
        length = rng.choice([1, 2, 4, 7, 8, 12, 16, 20, 24])
        shared = rng.random() < 0.5
        prompt = self.common[:length] if shared else [rng.randrange(1, 4) for _ in range(length)]
        max_tokens = rng.choice([1, 2, 5, 8, 12, 15]) if length < 24 else rng.choice([1, 8, 16])
        n = rng.choice([2, 3]) if kind in ("n", "all") and rng.random() < 0.6 else 1
        beams = n == 1 and ((kind == "beams" and rng.random() < 0.6) or (kind == "all" and rng.random() < 0.4))
        stream, wants = rng.random() < 0.5, self.wants
        params: SamplingParams | BeamSearchParams
        if beams:
            params = BeamSearchParams(
                beam_width=rng.choice([2, 3]),
                max_tokens=max_tokens,
                length_penalty=rng.choice([1.0, 0.0, -0.5, 2.0]),
                early_stopping=rng.choice([False, True, "never"]),
                ignore_eos=rng.random() < 0.2,
                stop_token_ids=rng.choice([(), (3,), (2, 3)]),
                cache_salt=rng.choice(["", "", "x"]),
            )
        else:
            params = SamplingParams(
                n=n,
                best_of=3 if n == 2 and not stream and wants.random() < 0.3 else None,
                logprobs=wants.choice([0, 1, 3]) if wants.random() < 0.4 else None,
                prompt_logprobs=wants.choice([0, 2]) if wants.random() < 0.25 else None,
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, max_tokens // 2]),
                ignore_eos=rng.random() < 0.2,
                seed=rng.choice([None, None, 7]),
                cache_salt=rng.choice(["", "", "x"]),
                timeout_s=self.timeouts.uniform(0.1, 20.0) if kind in ("aborts", "all") and self.timeouts.random() < 0.2 else None,
            )
        try:
            self.requests[request_id] = self.engine.add_request(
                prompt,
                params,
                request_id=request_id,
                priority=rng.choice([0, 0, 1, 2]),
                class_name=rng.choice(["default", "default", "b"]),
                stream=stream,
            )
        except RequestError as error:
            if "can never fit" not in str(error):
                raise
            self.stats.counts["refused"] += 1

    def _abort_some(self) -> None:
        if self.case.kind not in ("aborts", "all") or self.rng.random() >= 0.08 or not self.requests:
            return
        request_id = self.rng.choice(list(self.requests))
        if request_id in self.engine.requests:
            self.aborted.add(request_id)
        self.engine.abort(request_id)
        self.engine.abort(request_id)
        self.stats.counts["aborted"] += 1

    def _step(self) -> None:
        engine = self.engine
        self.barren += 1
        try:
            for output in engine.step():
                self.outputs.setdefault(output.request_id, []).append(output)
        except InjectedFailure:
            self.kv.check()
            self.barren = 0
            self.stats.counts["rolled back"] += 1
        self.clock.advance(1.0)
        if engine.wait_until is not None:
            self.barren = 0
            self.clock.sleep_until(engine.wait_until)
        if sum(request.seats for request in engine.scheduler.running) > engine.scheduler.max_num_seqs:
            raise AssertionError("more seats run than max_num_seqs")
        if self.barren > 6 + self.case.depth + 2 * len(engine.requests):
            raise AssertionError(f"{self.barren} steps without progress")
        self.stats.counts["steps"] += 1
        if self.stats.counts["steps"] > MAX_STEPS:
            raise AssertionError("the run does not end")

    def _check_end(self) -> None:
        usage = self.kv.usage()
        if usage.filled or usage.held or usage.host:
            raise AssertionError(f"at the end {usage} is held")
        for request_id, request in self.requests.items():
            answer = self.ended[request_id]
            expected = decode_alone(request)
            found = [(output.token_ids, output.finish_reason) for output in answer.outputs]
            if request_id in self.aborted:
                self._check_aborted(request, found)
            elif found != expected:
                raise AssertionError(f"{request_id} gives {found} instead of {expected}")
            if answer.prompt_token_ids != list(request.prompt):
                raise AssertionError(f"{request_id} returns another prompt")
            self._check_handed_out(request, answer)
            self._check_logprobs(request, answer)

    def _check_aborted(self, request: Request, found: list[tuple[list[int], str | None]]) -> None:
        """What an aborted request had until then is the beginning of what it would have given."""
        if all(reason not in ("abort", "timeout") for _, reason in found):
            raise AssertionError(f"{request.id} was aborted, its outputs are {found}")
        if request.beam_width:
            return  # which hypotheses it had by then, and whether those that ended are the better ones, nobody knows
        if len(found) < request.params.n:
            raise AssertionError(f"{request.id} was aborted and has too few outputs: {found}")
        for sequence in request.finished:
            whole, _ = sample_alone(request, sequence.sample_index)
            if sequence.output != whole[: len(sequence.output)]:
                raise AssertionError(f"{sequence.id} gave {sequence.output} before its abort instead of {whole}")

    def _check_handed_out(self, request: Request, answer: RequestOutput) -> None:
        """Pieces joined are the whole answer, each output ends once, and only the last piece is marked as such."""
        outputs = self.outputs[request.id]
        if [output.finished for output in outputs] != [False] * (len(outputs) - 1) + [True]:
            raise AssertionError(f"{request.id}: finished is {[output.finished for output in outputs]}")
        if not request.stream or request.beam_width:
            if len(outputs) != 1 or outputs[0] is not answer:
                raise AssertionError(f"{request.id}: {len(outputs)} outputs instead of one whole answer")
            return
        joined: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        for piece in (piece for output in outputs for piece in output.outputs):
            if piece.index in reasons:
                raise AssertionError(f"{request.id}: output {piece.index} goes on after its end")
            joined.setdefault(piece.index, []).extend(piece.token_ids)
            if piece.finish_reason is not None:
                reasons[piece.index] = piece.finish_reason
        if joined != {sequence.sample_index: sequence.output for sequence in request.finished} or set(reasons) != set(joined):
            raise AssertionError(f"{request.id}: the pieces {joined} ({reasons}) are not the answer {answer.outputs}")

    def _check_logprobs(self, request: Request, answer: RequestOutput) -> None:
        """Those that were asked for are those of the whole prefix, none is missing or there twice, and pieces carry them once."""
        params = request.params
        if params.prompt_logprobs is None:
            expected = []
        else:
            expected = score_tokens(request.prompt, params.prompt_logprobs)
            self.stats.counts["prompts scored"] += 1
        found = request.prompt_logprobs
        if found != (expected[: len(found)] if request.id in self.aborted else expected):
            raise AssertionError(f"{request.id} gives prompt logprobs {found} instead of {expected}")
        for sequence in request.finished:
            asked = params.num_logprobs
            wanted = score_alone(request, sequence.output, asked) if asked is not None and not request.beam_width else []
            if sequence.logprobs != wanted or (wanted and sequence.score != sum(entry.logprob for entry in wanted)):
                raise AssertionError(f"{sequence.id} gives logprobs {sequence.logprobs} instead of {wanted}")
            self.stats.counts["tokens scored"] += len(wanted)
        pieces = [output for output in self.outputs[request.id] if output.prompt_logprobs is not None]
        if len(pieces) > 1 or (answer.prompt_logprobs is None) != (params.prompt_logprobs is None):
            raise AssertionError(f"{request.id} gives its prompt logprobs {len(pieces)} times")
        if answer.prompt_logprobs is not None and answer.prompt_logprobs != [None, *(readable(entry, None) for entry in found)]:
            raise AssertionError(f"{request.id} gives prompt logprobs {answer.prompt_logprobs} instead of those of {found}")

"""An engine on the real runner with a tiny model, its parts in the test's hand, and what independent computation gives.

Expected tokens come from transformers: its logits, and the sampler for greedy and sampled ones (tested against transformers elsewhere),
beams from its own search. Neither engine, cache nor kernel has a part in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any, cast

import torch

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.clock import ManualClock
from octavo.core.descriptors import KernelPlugin, PoolShape
from octavo.core.engine import Engine
from octavo.core.execution import Handle
from octavo.core.kv import Allocator
from octavo.core.model import Model
from octavo.core.options import SchedulerOptions
from octavo.core.outputs import RequestOutput, StepReport
from octavo.core.plan import BatchPlan
from octavo.core.plan_builder import Proposer
from octavo.core.request import Request
from octavo.core.sampler import Sampler
from octavo.core.sampling_params import SamplingParams
from octavo.core.sampling_rows import RowRequest, SamplingRows
from octavo.core.scheduling import Scheduler
from octavo.core.text.tokenizer import Tokenizer
from octavo.core.token_counts import TokenCounts
from octavo.core.torch_runner import TorchRunner
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.schedulers.continuous import Continuous, ContinuousOptions
from tests.matrix.stacks import REGISTRY, loaded
from tests.models import VOCAB, reference_beams, reference_model, tiny

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 12


def make_kv(name: str, slots: int, *, host: int = 0) -> Allocator:
    """`contiguous`, or `paged-1` and so on, where the number is the block size."""
    pool = PoolShape(num_slots=slots, num_host_slots=host, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)
    kind, _, size = name.partition("-")
    if kind == "contiguous":
        return CONTIGUOUS.build(ContiguousOptions(reservation="request"), pool)
    return PAGED.build(PagedOptions(block_size=int(size)), pool)


class TensorRig:
    """One engine and its parts. Reports, plans and answers are gathered; invariants are checked after each step."""

    def __init__(
        self,
        kv: Allocator,
        *,
        family: str = "llama_gqa",
        model: Path | None = None,
        kernel: str = "sdpa",
        scheduler: Callable[..., Scheduler] = Continuous,
        options: SchedulerOptions | None = None,
        preemption: str = "recompute",
        max_num_seqs: int = MAX_NUM_SEQS,
        depth: int = 1,
        debug: bool = True,
        proposer: Proposer | None = None,
        wrap: Callable[[Model], Model] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.kv = kv
        self.folder = model or tiny(family)
        parts = loaded(self.folder, "llama", "torch")
        net = wrap(parts.model) if wrap else parts.model
        plugin = cast(KernelPlugin, REGISTRY.get("kernel", kernel))
        options = options or ContinuousOptions.model_validate(
            {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": MAX_MODEL_LEN, "preemption": preemption}
        )
        self.runner = TorchRunner(
            net,
            plugin.build(plugin.options(), net.layers, parts.facts),
            kv,
            clock=ManualClock(),
            max_rows=max_num_seqs,
            depth=depth,
            debug=debug,
        )
        self.plans: list[BatchPlan] = []
        self._submit = self.runner.submit
        self.runner.submit = self._recorded  # type: ignore[method-assign]
        self.engine = Engine(
            scheduler=scheduler(options, kv, proposer=proposer),
            kv=kv,
            runner=self.runner,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            tokenizer=tokenizer,
            clock=ManualClock(),
            depth=depth,
            debug=True,
        )
        self.engine.observers.add(self)
        self.reports: list[StepReport] = []
        self.answers: dict[str, RequestOutput] = {}

    def _recorded(self, plan: BatchPlan) -> Handle:
        self.plans.append(plan)
        return self._submit(plan)

    def octavo_step_finished(self, report: StepReport) -> None:
        """Gather the reports."""
        self.reports.append(report)

    def add(self, prompt: Seq[int], max_tokens: int, **params: Any) -> Request:
        """Add a request, greedy unless `params` say otherwise; a search where they have a `beam_width`."""
        if "beam_width" in params:
            return self.engine.add_request(prompt, BeamSearchParams(max_tokens=max_tokens, **params))
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, **({"temperature": 0} | params)))

    def step(self) -> None:
        """One step."""
        for output in self.engine.step():
            self.answers[output.request_id] = output

    def finish(self, *, failure: type[Exception] | None = None, limit: int = 400) -> int:
        """Step to the end, going on after each `failure`; returns how often it failed. Nothing may be held then."""
        failures = 0
        for _ in range(limit):
            if not self.engine.has_work:
                break
            try:
                self.step()
            except Exception as error:
                if failure is None or not isinstance(error, failure):
                    raise
                failures += 1
        usage = self.kv.usage()
        assert not self.engine.has_work
        assert (usage.filled, usage.held, usage.host) == (0, 0, 0)
        return failures

    def tokens(self, request: Request) -> list[list[int]]:
        """The ids of each output of a request that is over."""
        return [output.token_ids for output in self.answers[request.id].outputs]

    def moved(self, kind: str) -> int:
        """Slots that transfers of this kind moved, in all steps reported."""
        return sum(report.transfers.get(kind, 0) for report in self.reports)

    def expected(self, request: Request) -> list[list[int]]:
        """What transformers' logits give for this request."""
        if request.beams is not None:
            return [tokens for tokens, _ in reference_beams(self.folder, request.prompt, request.beams)]
        return [decode(self.folder, request, index) for index in range(request.width)]


# ------------------------------------------------------- independent computation


@functools.cache
def logits_after(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """[V] fp32, the model run by transformers over the whole prefix, with no cache."""
    with torch.inference_mode():
        return cast(torch.Tensor, reference_model(folder)(torch.tensor([tokens]), use_cache=False).logits[0, -1].float())


def decode(folder: Path, request: Request, sample_index: int = 0) -> list[int]:
    """One sample of a request, alone: draws are functions of (seed, sample index, position)."""
    output: list[int] = []
    while len(output) < request.max_tokens:
        prefix = (*request.prompt, *output)
        counts = TokenCounts(request.prompt).follow(list(output))
        row = RowRequest(
            request.sampling, sample_index, len(prefix), len(output), prompt=request.prompt, output=list(output), counts=counts
        )
        sampled = Sampler().sample(logits_after(folder, prefix).clone()[None], SamplingRows.build([row]))
        output.append(int(sampled.token_ids[0]))
    return output

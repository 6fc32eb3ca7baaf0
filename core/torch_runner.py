"""`TorchRunner` executes plans on a device: transfers, inputs, model with kernel, sampler.

It owns the cache tensors. On a GPU `submit` returns while the device still works and `Handle.result` waits, once a step.
Must not know: policies, allocators' insides, text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo.core.attention import Kernel, LayerCache
from octavo.core.clock import Clock
from octavo.core.errors import EngineError
from octavo.core.execution import Handle, Runner, StepResult
from octavo.core.forks import Candidate
from octavo.core.inputs import InputBuilder, StepInputs
from octavo.core.kv import Allocator
from octavo.core.model import Model
from octavo.core.plan import BatchPlan, Chunk, Transfer
from octavo.core.sampler import Candidates, Sampler
from octavo.core.sampling_rows import RowRequest, SamplingRows


def allocate_cache(kernel: Kernel, num_slots: int, device: torch.device, *, fill: float | None = None) -> list[LayerCache]:
    """Cache tensors [num_slots, *shape] of every layer, as the kernel's specs say.

    `fill` (NaN, say) shows who reads slots that nobody wrote; None leaves zeros, which take no memory until touched.
    """
    caches: list[LayerCache] = []
    for layer in kernel.layers:
        tensors = tuple(torch.zeros((num_slots, *spec.shape), dtype=spec.dtype, device=device) for spec in kernel.cache_spec(layer))
        if fill is not None:
            for tensor in tensors:
                tensor.fill_(fill)
        caches.append(tensors)
    return caches


class TorchRunner(Runner):
    """One model on one device. `depth` steps may be in flight: so many rows of sampled tokens stay on the device."""

    def __init__(
        self,
        model: Model,
        kernel: Kernel,
        kv: Allocator,
        *,
        clock: Clock,
        max_rows: int,
        depth: int = 1,
        fill: float | None = None,
    ) -> None:
        self.model = model
        self.kernel = kernel
        self.cache = allocate_cache(kernel, kv.capacity, model.device, fill=fill)
        self.host_cache = allocate_cache(kernel, kv.host_capacity, torch.device("cpu"))
        self._clock = clock
        self._depth = depth
        self._max_rows = max_rows
        self._kv = kv
        self._sampler = Sampler()
        self._recent = torch.zeros(depth * max_rows, dtype=torch.int64, device=model.device)
        self._steps = 0
        self._inputs = InputBuilder(kv, device=model.device, max_rows=max_rows, depth=depth)

    def submit(self, plan: BatchPlan) -> Handle:
        """Build the inputs, then move KV, run the model and sample."""
        begun = self._clock.now()
        inputs = self._inputs.build(plan) if plan.chunks else None
        handle = TorchHandle(plan, {"inputs": self._clock.now() - begun}, self._clock)
        try:
            self._transfer(plan.transfers)
            handle.transfers_done = True
            if inputs is not None:
                self._run(plan, inputs, handle)
        except BaseException as error:
            handle.error = error
        return handle

    @torch.inference_mode()
    def _transfer(self, transfers: Seq[Transfer]) -> None:
        for transfer in transfers:
            for device, host in zip(self.cache, self.host_cache, strict=True):
                sources, targets = (host if transfer.kind == "in" else device), (host if transfer.kind == "out" else device)
                for source, target in zip(sources, targets, strict=True):
                    moved = source[transfer.source : transfer.source + transfer.count]
                    target[transfer.target : transfer.target + transfer.count].copy_(moved)

    @torch.inference_mode()
    def _run(self, plan: BatchPlan, inputs: StepInputs, handle: TorchHandle) -> None:
        """Forward pass and sampling; leaves device tensors in the handle."""
        begun = self._clock.now()
        ids = inputs.input_ids
        if inputs.input_from is not None:
            known = inputs.input_from < 0
            ids = torch.where(known, ids, self._recent[inputs.input_from.clamp(min=0)])
        meta, kernel, cache, layers = inputs.attention, self.kernel, self.cache, self.model.layers
        prepared = kernel.prepare(meta)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kernel.write(cache[layer], k, v, meta, prepared)
            return kernel.attend(q, cache[layer], meta, prepared, layers[layer])

        rows = SamplingRows.build([row for chunk in plan.chunks for row in row_requests(chunk)])
        greedy = rows.all_greedy
        out = self.model.forward(ids, inputs.positions, attend, logit_rows=inputs.logit_rows, select="argmax" if greedy else "logits")
        forwarded = self._clock.now()
        if greedy:
            handle.tokens = out
        else:
            sampled = self._sampler.sample(out, rows)
            handle.tokens, handle.candidates = sampled.token_ids, sampled.candidates
        if self._depth > 1:
            self._remember(plan, handle.tokens, rows)
        self._steps += 1
        handle.seconds.update(forward=forwarded - begun, sample=self._clock.now() - forwarded)

    def _remember(self, plan: BatchPlan, tokens: torch.Tensor, rows: SamplingRows) -> None:
        """Keep each chunk's last sampled token on the device, where the next step's inputs find it."""
        draws = iter(np.cumsum(rows.draws).tolist())
        ring = (self._steps % self._depth) * self._max_rows
        for index, chunk in enumerate(plan.chunks):
            for _ in range(len(row_requests(chunk))):
                last = next(draws)
            if chunk.samples:
                self._recent[ring + index] = tokens[last - 1]

    def close(self) -> None:
        """Let go of the caches."""
        self.cache, self.host_cache = [], []


def row_requests(chunk: Chunk) -> list[RowRequest]:
    """How to draw from each of the chunk's rows of logits: one, or with drafts one more than there are drafts."""
    if not chunk.samples:
        return []
    sequence, request = chunk.sequence, chunk.sequence.request
    beams, first = request.beam_width, request.width > 1 and not request.forked
    return [
        RowRequest(
            params=request.params,
            seed=request.seed,
            sample_index=sequence.sample_index,
            position=position + 1,
            num_output=position + 1 - sequence.prompt_len,
            stop_ids=request.stop_ids,
            draws=0 if beams else request.width if first else 1,
            candidates=2 * beams,
        )
        for position in range(chunk.logits_from, chunk.stop)
    ]


class TorchHandle:
    """A step in flight: tensors that the device may still be working on."""

    def __init__(self, plan: BatchPlan, seconds: dict[str, float], clock: Clock) -> None:
        self.transfers_done = False
        self.error: BaseException | None = None
        self.tokens: torch.Tensor | None = None  # [N] drawn ids
        self.candidates: Candidates | None = None
        self.seconds = seconds
        self._plan = plan
        self._clock = clock

    def result(self) -> StepResult:
        """Wait for the device, once, and deal the drawn ids out to the chunks."""
        if self.error is not None:
            raise self.error
        begun = self._clock.now()
        drawn = [] if self.tokens is None else self.tokens.tolist()
        self.seconds["sample"] = self.seconds.get("sample", 0.0) + self._clock.now() - begun
        tokens: list[Seq[int]] = []
        at = 0
        for chunk in self._plan.chunks:
            request = chunk.sequence.request
            count = 0
            if chunk.samples and not request.beam_width:
                count = request.width if request.width > 1 and not request.forked else 1 + len(chunk.drafts)
            mine = drawn[at : at + count]
            at += count
            if mine and min(mine) < 0:
                raise EngineError(f"the model gave no finite logits for request {request.id!r}: its weights or KV hold NaN or infinity")
            tokens.append(mine[: accepted(chunk.drafts, mine) + 1] if chunk.drafts else mine)
        return StepResult(tokens=tokens, candidates=self._candidates(), seconds=self.seconds)

    def _candidates(self) -> dict[int, list[Candidate]]:
        """The best tokens of each chunk of beams, by the chunk's index; such a chunk has one row of logits."""
        if self.candidates is None:
            return {}
        beams = [index for index, chunk in enumerate(self._plan.chunks) if chunk.samples and chunk.sequence.request.beam_width]
        ids, log_probs = self.candidates.token_ids.tolist(), self.candidates.log_probs.tolist()
        return {index: list(zip(*row, strict=True)) for index, *row in zip(beams, ids, log_probs, strict=True)}


def accepted(drafts: Seq[int], drawn: Seq[int]) -> int:
    """How many drafts were guessed right: draws are functions of seed, sample and position, so equality is all there is to check."""
    return next((i for i, (draft, token) in enumerate(zip(drafts, drawn, strict=False)) if draft != token), len(drafts))

"""`TorchRunner` executes plans on a device: transfers, inputs, model with kernel, sampler.

It owns the cache tensors. On a GPU `submit` returns while the device still works and `Handle.result` waits, once a step.
Must not know: policies, allocators' insides, text.
"""

from __future__ import annotations

import math

import torch

from octavo.core.arrays import Ints
from octavo.core.attention import Kernel, StepAttention
from octavo.core.clock import Clock
from octavo.core.errors import EngineError
from octavo.core.execution import Handle, Runner
from octavo.core.grammar.masks import MaskThread
from octavo.core.inputs import InputBuilder, StepInputs
from octavo.core.kv import Allocator
from octavo.core.kv_tensors import KVTensors, fused
from octavo.core.logits_processing import forbid
from octavo.core.model import Attend, Model
from octavo.core.out_of_memory import translated
from octavo.core.plan import BatchPlan
from octavo.core.row_requests import all_argmax, chunk_of_row, row_requests
from octavo.core.sampler import Sampler
from octavo.core.sampling_rows import SamplingRows
from octavo.core.scored_rows import scored_draws, scored_prompts
from octavo.core.scoring import score_rows
from octavo.core.torch_handle import TorchHandle


class TorchRunner(Runner):
    """One model on one device; up to `depth` steps of at most `max_rows` chunks may be in flight.

    `debug`: slots that nobody wrote hold NaN, and what goes into attention and comes out of it is checked in every layer. Without it,
    where a whole step is greedy, a request whose logits are NaN gets an arbitrary id; a step that samples always notices.
    `num_threads`: of the CPU, set before each step, since engines that share a thread may differ in it; None: as it is.
    """

    def __init__(
        self,
        model: Model,
        kernel: Kernel,
        kv: Allocator,
        *,
        clock: Clock,
        max_rows: int,
        depth: int = 1,
        debug: bool = False,
        num_threads: int | None = None,
    ) -> None:
        self.model = model
        self.kernel = kernel
        self.tensors = KVTensors(
            kernel,
            num_slots=kv.capacity,
            num_host_slots=kv.host_capacity,
            device=model.device,
            fill=math.nan if debug else None,
        )
        self._clock = clock
        self._debug = debug
        self._num_threads = num_threads
        self._sampler = Sampler()
        self._masks = MaskThread()
        self._inputs = InputBuilder(kv, device=model.device, max_rows=max_rows, depth=depth)
        self._ring = torch.zeros(depth * max_rows, dtype=torch.int64, device=model.device)  # see StepInputs
        self._broken: BaseException | None = None  # a step failed, and was not forgotten yet

    def submit(self, plan: BatchPlan) -> Handle:
        """Build the inputs, then move KV, run the model and sample. What fails once KV may have moved is told by the handle."""
        handle = TorchHandle(plan, self._clock)
        if self._broken is not None:
            handle.error = self._broken
            return handle
        if self._num_threads not in (None, torch.get_num_threads()):
            torch.set_num_threads(self._num_threads)
        begun = self._clock.now()
        try:
            inputs = self._inputs.build(plan) if plan.chunks else None
        except (MemoryError, RuntimeError) as error:
            raise translated(error) from None
        handle.seconds["inputs"] = self._clock.now() - begun
        try:
            for run in fused(plan.transfers):
                self.tensors.move(run)
                handle.transfers_done += len(run)
            if inputs is not None:
                self._run(plan, inputs, handle)
        except BaseException as error:
            handle.error = self._broken = translated(error)
        return handle

    @torch.inference_mode()
    def _run(self, plan: BatchPlan, inputs: StepInputs, handle: TorchHandle) -> None:
        """Forward pass and sampling; leaves device tensors in the handle."""
        begun = self._clock.now()
        ids = inputs.input_ids
        if inputs.input_from is not None:
            ids = torch.where(inputs.input_from < 0, ids, self._ring[inputs.input_from.clamp(min=0)])
        requests = [] if all_argmax(plan.chunks) else row_requests(plan.chunks)
        masks = self._masks.start(requests)
        rows = SamplingRows.build(requests) if requests else None
        model, prompts = self.model, inputs.prompts
        wanted = inputs.logit_rows if prompts is None else torch.cat((inputs.logit_rows, prompts.rows))
        hidden = model.forward(ids, inputs.positions, self._attend(plan, inputs), rows=wanted)
        drawn_from = hidden[: len(inputs.logit_rows)]
        out = model.argmax(drawn_from) if rows is None else model.logits(drawn_from)
        forwarded = self._clock.now()
        handle.draws = inputs.draws
        if rows is None:
            handle.tokens = out
        else:
            scored = scored_draws(plan.chunks, inputs.draws)
            raw = None if scored is None else out[self._tensor(scored.rows)]  # a copy: the sampler writes into its logits
            if masks is not None:
                handle.masks = self._masks.join(masks)
                forbid(out, handle.masks)
            handle.tokens, handle.candidates, refused = self._sampler.sample(out, rows)
            handle.errors = {chunk_of_row(plan.chunks, row): error for row, error in refused.items()}
            if scored is not None and raw is not None:
                ids = handle.tokens[self._tensor(scored.draws)].clamp(min=0)  # below 0: an error, told by the handle
                handle.drawn = scored, score_rows(raw.__getitem__, ids, scored.num_top)
        if prompts is not None:
            scored_from = hidden[len(inputs.logit_rows) :]
            of_prompts = scored_prompts(plan.chunks)
            handle.prompts = of_prompts, score_rows(lambda part: model.logits(scored_from[part]), prompts.targets, of_prompts.num_top)
        if inputs.keep_at is not None:
            self._ring[inputs.keep_at] = handle.tokens[inputs.keep_draws].clamp(min=0)  # no id is negative
        handle.seconds.update(forward=forwarded - begun, sample=self._clock.now() - forwarded)

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device, non_blocking=True)

    def _attend(self, plan: BatchPlan, inputs: StepInputs) -> Attend:
        """What the model calls in each layer; to find what is broken, layer by layer, with a look at what goes in and comes out."""
        meta = inputs.attention
        attend = StepAttention(self.kernel, self.tensors.device, meta)

        def checked(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for name, tensor in (("q", q), ("k", k), ("v", v)):
                _check_finite(tensor, f"{name} of layer {layer}", plan, meta.query_start)
            out = attend(layer, q, k, v)
            _check_finite(out, f"attention of layer {layer}", plan, meta.query_start)
            return out

        return checked if self._debug else attend

    def forget(self) -> None:
        """Steps in flight were rolled back: their tokens will be sampled again."""
        self._broken = None
        self._inputs.forget()

    def close(self) -> None:
        """Let go of the caches."""
        self._masks.close()
        self.tensors.free()


def _check_finite(tensor: torch.Tensor, what: str, plan: BatchPlan, query_start: torch.Tensor) -> None:
    """Raise EngineError that names the first request whose tokens [T, ...] hold NaN or infinity."""
    finite = tensor.isfinite()
    if finite.all():
        return
    token = int((~finite.flatten(1).all(1)).nonzero()[0])
    row = int(torch.searchsorted(query_start, token, right=True)) - 1
    owner = f"request {plan.chunks[row].sequence.request.id!r}" if row < len(plan.chunks) else "a dead row"
    raise EngineError(f"{what} is NaN or infinite for {owner}: the weights are broken, or it read KV that nobody wrote")

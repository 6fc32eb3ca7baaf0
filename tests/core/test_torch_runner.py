"""The real runner on a tiny model: what a step reads and writes, drafts, transfers, failed steps, logits that are not finite."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.core.clock import ManualClock
from octavo.core.errors import EngineError, PluginContractError
from octavo.core.kv_tensors import KVTensors
from octavo.core.model import Attend, Model
from octavo.core.plan import BatchPlan, Chunk, Transfer
from octavo.core.request import Sequence
from octavo.core.scheduling import Scheduler
from octavo.core.torch_handle import accepted
from octavo.core.torch_runner import TorchRunner
from octavo.plugins.schedulers.static import Static, StaticOptions
from tests.models import PROMPTS
from tests.tensor_rig import MAX_MODEL_LEN, TensorRig, logits_after, make_kv

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


class Wrapped(Model):
    """A model around another one."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.shape, self.layers, self.dtype, self.device = inner.shape, inner.layers, inner.dtype, inner.device

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(input_ids, positions, attend, rows=rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.argmax(hidden)

    def weight_bytes(self) -> int:
        return self.inner.weight_bytes()


class Pieces(Scheduler):
    """Decodes, then prompts in pieces of three tokens."""

    chunking = True

    def schedule(self, now: float) -> BatchPlan:
        plan = self.plan()
        for request in sorted(self.running, key=lambda r: r.prefilling):
            self.grow(plan, request, 3)
        for request in self.queue():
            if not plan.left or not self.admit(plan, request):
                break
            self.grow(plan, request, 3)
        return plan.build()


# ----------------------------------------------------------------- rows of a step


def test_dead_rows_are_computed_and_write_nothing() -> None:
    """The kernel sees a row of length 0 and slot -1 for each ended member; no slot outside the members' regions was written."""
    options = StaticOptions(max_num_seqs=3, max_num_batched_tokens=MAX_MODEL_LEN, dead_rows="compute")
    kv = make_kv("contiguous", 100)
    rig = TensorRig(kv, scheduler=Static, options=options)
    seen: list[tuple[list[int], list[int], int]] = []
    prepare = rig.runner.kernel.prepare

    def spy(meta: Any) -> Any:
        seen.append((meta.seq_lens.tolist(), meta.slots.tolist(), len(meta.query_start)))
        return prepare(meta)

    rig.runner.kernel.prepare = spy  # type: ignore[method-assign]
    requests = [rig.add(PROMPTS[1], 2), rig.add(PROMPTS[2], 9), rig.add(PROMPTS[3], 4)]
    rig.step()
    used = [slot for request in requests for sequence in request.sequences for slot in _written(kv.region(sequence), sequence)]
    rig.finish()
    assert [rig.tokens(request) for request in requests] == [rig.expected(request) for request in requests]
    assert [lengths.count(0) for lengths, _, _ in seen] == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    for lengths, slots, bounds in seen:
        assert bounds == len(lengths) + 1 == 4
        assert slots.count(-1) == lengths.count(0)
        assert lengths[len(lengths) - lengths.count(0) :] == [0] * lengths.count(0)  # dead rows come last
    keys = rig.runner.tensors.device[0][0]
    written = {slot for slot in range(len(keys)) if bool(keys[slot].isfinite().all())}
    assert written == set(used)


def _written(region: tuple[int, int], sequence: Sequence) -> range:
    return range(region[0], region[0] + sequence.max_positions)


def test_only_last_positions_give_logits() -> None:
    """A prompt in pieces asks for no logits before its last piece, and its tokens are those of a prompt run whole."""
    asked: list[list[int]] = []

    class Spy(Wrapped):
        def forward(self, *args: Any, rows: torch.Tensor) -> torch.Tensor:
            asked.append(rows.tolist())
            return super().forward(*args, rows=rows)

    rig = TensorRig(make_kv("paged-4", 128), scheduler=Pieces, wrap=Spy)
    long, short = rig.add(PROMPTS[2], 4), rig.add(PROMPTS[1], 4)  # 11 tokens in 3 + 3 + 3 + 2, and 5 in 3 + 2
    rig.finish()
    assert [rig.tokens(long), rig.tokens(short)] == [rig.expected(long), rig.expected(short)]
    #             3 + 3, then 3 + 2, short decodes before long's pieces, and so on
    assert asked == [[], [4], [0], [0, 2], [0, 1], [0], [0]]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("params", [{}, SAMPLED, SAMPLED | {"top_k": 5, "min_p": 0.01}], ids=["greedy", "sampled", "filtered"])
def test_tokens_of_a_mixed_batch(depth: int, params: dict[str, Any]) -> None:
    """Greedy beside sampled, whole steps of argmax and steps with logits: each is what its own computation gives."""
    rig = TensorRig(make_kv("paged-4", 256), depth=depth)
    requests = [rig.add(prompt, 6 + i, **(params if i % 2 else {})) for i, prompt in enumerate(PROMPTS[:4])]
    rig.finish()
    assert [rig.tokens(request) for request in requests] == [rig.expected(request) for request in requests]


def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    """A greedy request with such a ban is no plain argmax: the second best comes where the best would end it too early."""
    free = TensorRig(make_kv("paged-4", 256))
    unbound = free.add(PROMPTS[2], 3)
    free.finish()
    [[best, *_]] = free.tokens(unbound)
    rig = TensorRig(make_kv("paged-4", 256))
    request = rig.add(PROMPTS[2], 8, stop_token_ids=[best], min_tokens=1)
    rig.finish()
    [output] = rig.answers[request.id].outputs
    second = int(logits_after(rig.folder, PROMPTS[2]).topk(2).indices[1])
    assert output.token_ids[0] == second


# ------------------------------------------------------------------------- drafts


def _right(answer: list[int], at: int) -> list[int]:
    return answer[at : at + 3]


def _wrong(answer: list[int], at: int) -> list[int]:
    return [(token + 1) % 384 for token in answer[at : at + 3]]


def _partly(answer: list[int], at: int) -> list[int]:
    return [token if i < at % 4 else token + 1 & 255 for i, token in enumerate(answer[at : at + 3])]


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("guess", "steps"), [(_right, 6), (_wrong, 21), (_partly, None)])
@pytest.mark.parametrize("layout", ["contiguous", "paged-4"])
def test_drafts_change_the_number_of_steps_and_no_token(
    layout: str, guess: Callable[[list[int], int], list[int]], steps: int | None, params: dict[str, Any]
) -> None:
    """Guessed right, three drafts and one more token come of a step; wrong, one; partly, what was right and one more."""
    answers: dict[tuple[int, ...], list[int]] = {}

    def propose(sequence: Sequence) -> list[int]:
        return guess(answers[sequence.request.prompt], len(sequence.output))

    rig = TensorRig(make_kv(layout, 400), proposer=propose)
    requests = [rig.add(prompt, 21, **params) for prompt in PROMPTS[:3]]
    answers.update({request.prompt: rig.expected(request)[0] for request in requests})
    rig.finish()
    assert [rig.tokens(request)[0] for request in requests] == list(answers.values())
    drafts = sum(len(chunk.drafts) for plan in rig.plans for chunk in plan.chunks)
    assert drafts > 0
    if steps is None:
        assert 6 < len(rig.plans) < 21
    else:
        assert len(rig.plans) == steps


@pytest.mark.parametrize(
    ("drafts", "drawn", "count"), [((5, 6), [5, 6, 7], 2), ((5, 6), [5, 9, 7], 1), ((5, 6), [9, 6, 7], 0), ((), [3], 0)]
)
def test_accepted(drafts: tuple[int, ...], drawn: list[int], count: int) -> None:
    """Those before the first that differs."""
    assert accepted(drafts, drawn) == count


# ------------------------------------------------------------------ failed steps


class Broken(RuntimeError):
    """What the test's model raises."""


def failing(at: set[int], *, half: bool) -> Callable[[Model], Model]:
    """A model that raises in these calls: at once, or with the KV of its first layer written and garbage in the second."""
    calls = itertools.count()

    class Failing(Wrapped):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, **kwargs: Any) -> torch.Tensor:
            if next(calls) not in at:
                return super().forward(input_ids, positions, attend, **kwargs)
            if not half:
                raise Broken("the model fails")

            def half_way(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                out = attend(layer, q, k if layer == 0 else k + 100, v)
                if layer == 1:
                    raise Broken("the model fails half way")
                return out

            return super().forward(input_ids, positions, half_way, **kwargs)

    return Failing


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "paged-4"])
def test_the_engine_goes_on_after_a_failed_step(layout: str, half: bool, depth: int) -> None:
    """Rolled back and repeated, forks, swapping and beams included: the same tokens, and as many failures as were asked for."""
    fails = {0, 3, 4, 9, 14, 22}
    kv = make_kv(layout, 170 if layout == "contiguous" else 84, host=160)
    rig = TensorRig(kv, preemption="swap", depth=depth, wrap=failing(fails, half=half))
    requests = [
        rig.add(PROMPTS[4], 12, **SAMPLED),
        rig.add(PROMPTS[2], 12, n=3, **SAMPLED),
        rig.add(PROMPTS[1], 12),
        rig.add(PROMPTS[3], 10, beam_width=2),
        rig.add(PROMPTS[2], 12, **SAMPLED),
    ]
    assert rig.finish(failure=Broken) == len(fails)
    assert [rig.tokens(request) for request in requests] == [rig.expected(request) for request in requests]
    assert rig.moved("copy") > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_transfers_that_fail_half_way(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tensors of a run have moved and others not, and runs of the same step before it have: only the rest is repeated."""
    move, calls, failed = KVTensors.move, itertools.count(), list[int]()

    def breaks(self: KVTensors, run: list[Transfer]) -> None:
        if (call := next(calls)) % 2 != 1:
            return move(self, run)
        device, host = self.device, self.host
        self.device, self.host = device[:1], host[:1]
        move(self, run)
        self.device, self.host = device, host
        failed.append(call)
        raise Broken("a copy fails")

    monkeypatch.setattr(KVTensors, "move", breaks)
    rig = TensorRig(make_kv("paged-4", 72, host=160), preemption="swap", depth=depth)
    requests = [rig.add(PROMPTS[index], 14, n=n, **SAMPLED) for index, n in ((4, 1), (2, 3), (3, 1), (1, 3))]
    failures = rig.finish(failure=Broken)
    assert failures == len(failed) > 3
    assert min(rig.moved(kind) for kind in ("copy", "out", "in")) > 0
    assert [rig.tokens(request) for request in requests] == [rig.expected(request) for request in requests]


def test_nothing_runs_behind_a_failed_step() -> None:
    """The next step's transfers stay undone, and its own result is an error, until the runner is told to forget."""
    kv = make_kv("paged-4", 64)
    rig = TensorRig(kv, depth=2, wrap=failing({0}, half=False))
    runner = rig.runner
    sequence = rig.add(PROMPTS[2], 4).sequences[0]
    kv.open(sequence)
    assert kv.reserve(sequence, 0, 11)
    keys = runner.tensors.device[0][0]
    keys[0:2] = torch.tensor([1.0, 2.0])[:, None, None]
    first = runner.submit(BatchPlan((Chunk(sequence, 0, 11, 10, True, (), 0),), transfers=(Transfer("copy", 0, 40, 1),)))
    second = runner.submit(BatchPlan(transfers=(Transfer("copy", 1, 41, 1), Transfer("copy", 1, 42, 1))))
    assert (first.transfers_done, second.transfers_done) == (1, 0)
    assert keys[40, 0, 0] == 1.0
    assert bool(keys[41:43].isnan().all())
    for handle in (first, second):
        with pytest.raises(Broken):
            handle.result()
    runner.forget()
    with pytest.raises(PluginContractError, match="neither known nor sampled by a step in flight"):
        runner.submit(BatchPlan((Chunk(sequence, 11, 1, 11, True, (), 0),)))
    third = runner.submit(BatchPlan(transfers=(Transfer("copy", 1, 41, 1), Transfer("copy", 1, 42, 1))))
    assert (third.result().tokens, third.transfers_done) == ([], 2)
    assert keys[41:43, 0, 0].tolist() == [2.0, 2.0]


def test_a_step_of_transfers_alone_runs() -> None:
    """It moves KV and gives no tokens; steps in flight around it keep their order."""
    rig = TensorRig(make_kv("paged-4", 256), depth=3)
    request = rig.add(PROMPTS[3], 20, **SAMPLED)
    spare = 252
    schedule = rig.engine.scheduler.schedule

    def sometimes(now: float) -> BatchPlan:
        if len(rig.plans) % 3 == 2:
            return BatchPlan(transfers=(Transfer("copy", 0, spare, 4),))
        return schedule(now)

    rig.engine.scheduler.schedule = sometimes  # type: ignore[method-assign]
    for _ in range(200):
        if not rig.engine.requests:
            break
        rig.step()
    assert rig.tokens(request) == rig.expected(request)
    assert sum(not plan.chunks for plan in rig.plans) > 5
    assert torch.equal(rig.runner.tensors.device[1][0][:4], rig.runner.tensors.device[1][0][spare:])


# --------------------------------------------------------------- what is not finite


class Poisoned(Wrapped):
    """The logits of every step's last row are NaN."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().logits(hidden)
        out[-1:] = torch.nan
        return out


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("beam_width", [0, 2])
def test_only_the_request_without_finite_logits_fails(beam_width: int, depth: int) -> None:
    """Sampled or searched, it ends with an error that says why; its neighbour goes on to its end."""
    rig = TensorRig(make_kv("paged-4", 256), wrap=Poisoned, depth=depth)
    first = rig.add(PROMPTS[1], 4, stop_token_ids=[0], min_tokens=1)  # in the first step its row, too, needs logits
    second = rig.add(PROMPTS[2], 4, **({"beam_width": beam_width} if beam_width else SAMPLED))
    rig.finish()
    assert rig.tokens(first) == rig.expected(first)
    for output in rig.answers[second.id].outputs:
        assert (output.token_ids, output.finish_reason) == ([], "error")
        assert output.error == "the model gave no finite logits: its weights or this request's KV hold NaN or infinity"


def test_under_debug_a_greedy_step_notices_kv_that_nobody_wrote() -> None:
    """An argmax cannot tell that its logits are NaN: attention is checked in every layer, and the request named."""
    kv = make_kv("paged-4", 256)
    rig = TensorRig(kv)
    first, second = rig.add(PROMPTS[1], 8), rig.add(PROMPTS[2], 8)
    rig.step()
    table, _ = kv.table(second.sequences[0])
    rig.runner.tensors.device[1][1][int(table[0]) * 4] = torch.nan
    with pytest.raises(EngineError, match=f"attention of layer 1 is NaN or infinite for request '{second.id}': the weights are broken, or"):
        rig.step()
    assert not rig.engine.requests[first.id].finished


def test_closing_lets_go_of_the_pool() -> None:
    """No tensor of the cache is held."""
    rig = TensorRig(make_kv("paged-4", 256, host=64))
    assert len(rig.runner.tensors.device) == len(rig.runner.tensors.host) == 2
    rig.engine.close()
    assert rig.runner.tensors.device == rig.runner.tensors.host == []


def test_a_pool_is_nan_only_under_debug() -> None:
    """Otherwise zeros, which take no memory until they are written."""
    rig = TensorRig(make_kv("paged-4", 256))
    plain = TorchRunner(rig.runner.model, rig.runner.kernel, rig.kv, clock=ManualClock(), max_rows=1)
    assert bool(rig.runner.tensors.device[0][0].isnan().all())
    assert not bool(plain.tensors.device[0][0].any())

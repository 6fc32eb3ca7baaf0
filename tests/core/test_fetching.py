"""What the host fetches of a step: every bit of it, and in one transfer."""

from __future__ import annotations

import pytest
import torch

from octavo.core import torch_handle
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.clock import ManualClock
from octavo.core.errors import OutOfMemoryError
from octavo.core.fetching import fetch
from octavo.core.plan import BatchPlan
from octavo.core.sampling_params import SamplingParams
from octavo.core.torch_handle import TorchHandle
from octavo.llm import LLM
from tests.matrix.stacks import build
from tests.matrix.test_equal_tokens import STACKS
from tests.models import PROMPTS, tiny

STACK = "chunked + paged + sdpa + torch + llama"


def test_bits_and_shapes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids beyond 32 bits, NaN, infinities, zeros of both signs, tensors with gaps or nothing in them; one wait for all."""
    waits: list[int] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (waits.append(tensor.numel()), cpu(tensor))[1])
    tensors = [
        torch.tensor([[2**62, -1], [0, -(2**40)]]),
        torch.tensor([float("nan"), -torch.inf, torch.inf, -0.0, 0.0, 1e-45, 3.1]),
        torch.zeros(0, 4, dtype=torch.int64),
        torch.arange(12.0).view(3, 4)[:, ::2],
    ]
    found = fetch(tensors)
    assert waits == [sum(tensor.numel() for tensor in tensors)]
    for one, other in zip(tensors, found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        bits = torch.int64 if one.dtype == torch.int64 else torch.int32
        assert torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))
    assert [tensor.tolist() for tensor in fetch([torch.tensor([5])])] == [[5]] and fetch([]) == []


def test_a_result_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, beams, log probabilities of outputs and prompts side by side: what stays on the device is never read again."""
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1),
        BeamSearchParams(beam_width=3, max_tokens=6),
        SamplingParams(seed=1, n=2, max_tokens=6, logprobs=0),
    ]
    fetched: list[int] = []

    def spoiling(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        host = [tensor.clone() for tensor in fetch(tensors)]
        fetched.append(len(tensors))
        with torch.inference_mode():
            for tensor in tensors:
                tensor.fill_(-7)
        return host

    def answers() -> list[object]:
        with LLM.from_built(build(tiny("llama_gqa"), STACKS[STACK], max_model_len=64, num_kv_slots=512, max_num_seqs=8)) as llm:
            for prompt, asked in zip(PROMPTS[1:], params, strict=False):
                llm.engine.add_request(prompt, asked)
            found, steps = [], 0
            while llm.engine.has_work:
                found += llm.engine.step()
                steps += 1
            assert not fetched or len(fetched) == steps
            return sorted((output.request_id, repr(output.outputs), repr(output.prompt_logprobs)) for output in found)

    expected = answers()
    monkeypatch.setattr(torch_handle, "fetch", spoiling)
    assert answers() == expected
    assert max(fetched) == 1 + 2 + 5 + 5


def test_memory_may_run_out_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as what it is, so that the engine runs less at once."""

    def full(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch_handle, "fetch", full)
    with pytest.raises(OutOfMemoryError):
        TorchHandle(BatchPlan(), ManualClock()).result()

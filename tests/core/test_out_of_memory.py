"""Memory that runs out inside PyTorch is recognised, whichever way it says so, and the real runner's step is tried again, smaller."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from octavo.core.errors import OutOfMemoryError
from octavo.core.model import Attend, Model
from octavo.core.out_of_memory import translated
from tests.core.test_torch_runner import Wrapped
from tests.models import PROMPTS
from tests.tensor_rig import TensorRig, make_kv


def too_much_for_any_computer() -> None:
    torch.empty(2**47)  # 512 TiB


def of_python() -> None:
    bytearray(2**60)


def of_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


def of_a_library() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


CAUSES = [too_much_for_any_computer, of_python, of_a_gpu, of_a_library]


def raised_by(cause: Callable[[], None]) -> BaseException:
    try:
        cause()
    except BaseException as error:
        return translated(error)
    raise AssertionError("nothing was raised")


class Limited(Wrapped):
    """No memory for more than two rows of logits."""

    def __init__(self, inner: Model, cause: Callable[[], None]) -> None:
        super().__init__(inner)
        self.cause = cause
        self.failures = 0
        self.activations: list[weakref.ref[torch.Tensor]] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions, attend, rows=rows)
        if len(rows) > 2:
            self.failures += 1
            large = torch.zeros(1000)
            self.activations.append(weakref.ref(large))
            self.cause()
        return hidden


@pytest.mark.parametrize("cause", CAUSES)
def test_each_way_to_say_it_is_recognised(cause: Callable[[], None]) -> None:
    """PyTorch's real error of a CPU, Python's, and those of a GPU become OutOfMemoryError, in one line."""
    error = raised_by(cause)
    assert isinstance(error, OutOfMemoryError) and "\n" not in str(error)
    assert error.__cause__ is None and error.__traceback__ is None


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    """A mistake is not taken for want of memory."""
    assert translated(error) is error


@pytest.mark.parametrize("cause", CAUSES)
def test_the_step_is_tried_again_smaller(cause: Callable[[], None]) -> None:
    """Every request gets its tokens, though no step of more than two goes well; the oldest is not preempted."""
    made: list[Limited] = []

    def wrap(model: Model) -> Model:
        made.append(Limited(model, cause))
        return made[0]

    rig = TensorRig(make_kv("paged-4", 400), wrap=wrap)
    requests = [rig.add(prompt, 8) for prompt in PROMPTS[:5]]
    rig.finish()
    assert made[0].failures > 0 and rig.engine.relief.count == made[0].failures
    assert [rig.tokens(request) for request in requests] == [rig.expected(request) for request in requests]
    assert requests[0].num_preemptions == 0


def test_a_step_that_failed_holds_no_tensors_when_it_is_tried_again() -> None:
    """What it had allocated is free by then, without a garbage collection: no error that is kept has frames that hold it."""
    held: list[int] = []

    class Watching(Limited):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
            held.append(sum(reference() is not None for reference in self.activations))
            return super().forward(input_ids, positions, attend, rows=rows)

    rig = TensorRig(make_kv("paged-4", 400), wrap=lambda model: Watching(model, of_a_gpu))
    for prompt in PROMPTS[:4]:
        rig.add(prompt, 4)
    gc.disable()
    try:
        rig.finish()
    finally:
        gc.enable()
    assert rig.engine.relief.count > 0 and set(held) == {0}

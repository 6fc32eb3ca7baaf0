"""Which errors mean that memory ran out: PyTorch has several, and only one has a class of its own.

Must not know: what was computed, what is done about it.
"""

from __future__ import annotations

import torch

from octavo.core.errors import OutOfMemoryError

SIGNS = (
    "out of memory",  # CUDA's own, through whichever library met it
    "DefaultCPUAllocator: can't allocate memory",
    "not enough memory",  # the CPU's allocator on other platforms
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def translated(error: BaseException) -> BaseException:
    """The error itself, or an OutOfMemoryError in its place if that is what it means.

    The new one has no traceback and no cause: their frames would hold the tensors of the very step that is to make room.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    ):
        return OutOfMemoryError(f"memory ran out in a step: {str(error).partition(chr(10))[0] or type(error).__name__}")
    return error

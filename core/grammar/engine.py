"""The few calls of llguidance that we make, and its limits.

Must not know: our own classes. Imports neither it nor numpy: the helper process of `trial` starts with this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 200_000,  # a step of some 15 ms at most
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # 1 to 2 kB each, shared by all outputs of a grammar
    "verbose_errors": False,
}
LONGEST_ERROR = 600  # characters


class _Table:
    """What llguidance asks of a tokenizer."""

    def __init__(self, table: list[bytes], end: int) -> None:
        self.tokens = table
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [end]

    def __call__(self, text: bytes) -> list[int]:
        return []  # asked to write forced text in the tokenizer's way; nothing is forced


def new_tokenizer(table: list[bytes], end: int) -> Any:
    """An LLTokenizer of these entries, of which `end` ends an output."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Table(table, end)))


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """An LLMatcher; what is wrong with it `problem_of` says."""
    import llguidance

    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))


def problem_of(matcher: Any) -> str:
    """What is wrong with a matcher, "" if nothing."""
    if not matcher.is_error():
        return ""
    text = str(matcher.get_error()).replace("<non-verbose/>", "").partition("\n<backtrace>")[0].strip()
    return text.replace("NoExtensionBias", "no token of this model's vocabulary goes on with it")


def shortened(error: str) -> str:
    """The beginning and the end: it may quote the whole grammar before it says what is wrong."""
    half = LONGEST_ERROR // 2
    return error if len(error) <= LONGEST_ERROR else f"{error[:half]} ... {error[-half:]}"


def fill(matchers: Seq[Any], masks: npt.NDArray[np.int32]) -> None:
    """masks [S, words of the whole vocabulary], C-contiguous; bit t of a row is set where its matcher takes token t next."""
    num_bytes = masks.shape[1] * masks.itemsize
    if len(matchers) == 1:
        matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, num_bytes)
    else:
        _executor().unsafe_compute_mask_ptr([(m, row) for row, m in enumerate(matchers)], masks.ctypes.data, num_bytes, len(matchers))


@cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor(num_threads=min(8, max(1, (os.cpu_count() or 1) // 2)))

"""Which tokens the rows of a step may draw: worked out in a thread while the model runs.

llguidance lets go of the interpreter's lock, so that a step whose rows have grammars takes no longer where the model takes longer than
they do. Must not know: torch, plans, how a token is chosen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from octavo.core.grammar.compiler import Matcher, next_tokens
from octavo.core.sampling_rows import RowRequest

PATIENCE_S = 10.0  # a row takes far below a millisecond, the worst that llguidance's limits allow some 50
LATE = f"the grammar engine did not say within {PATIENCE_S:g} s which tokens may follow"
DEAD_END = "no token of this model's vocabulary goes on with the text as structured_outputs want it"


@dataclass(slots=True)
class Masks:
    """For the S rows of a step that have a grammar. Rows that ended or failed allow nothing."""

    rows: list[int]  # their indices among all rows of logits
    bits: npt.NDArray[np.int32]  # [S, W] bit t: token t may be drawn
    ended: set[int] = field(default_factory=set)  # rows whose output is complete and goes on no further
    errors: dict[int, str] = field(default_factory=dict)  # rows that can neither go on nor end


class PendingMasks:
    """Being worked out."""

    def __init__(self, requests: Seq[RowRequest], rows: list[int]) -> None:
        self._requests = [requests[row] for row in rows]
        self._rows = rows
        self._done = threading.Event()
        self._masks: Masks | None = None
        self._failure: BaseException | None = None

    def work(self) -> None:
        """In the thread."""
        try:
            self._masks = _masks_of(self._requests, self._rows)
        except BaseException as failure:  # told to whoever waits
            self._failure = failure
        self._done.set()

    def wait(self, seconds: float = PATIENCE_S) -> tuple[Masks, bool]:
        """The masks, and whether they came in time; if not, all these rows failed. Raises what went wrong in the thread."""
        if not self._done.wait(seconds):
            words = self._requests[0].grammar.vocabulary.mask_words if self._requests[0].grammar is not None else 0
            return Masks(self._rows, np.zeros((len(self._rows), words), np.int32), errors=dict.fromkeys(self._rows, LATE)), False
        if self._failure is not None or self._masks is None:
            raise self._failure or RuntimeError("no masks were made")
        return self._masks, True


class MaskThread:
    """One thread for a runner, started when the first mask is wanted. One that hangs is left alone and another started."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] | None = None

    def start(self, requests: Seq[RowRequest]) -> PendingMasks | None:
        """None where no row has a grammar."""
        rows = [index for index, request in enumerate(requests) if request.grammar is not None]
        if not rows:
            return None
        if self._queue is None:
            self._queue = SimpleQueue()
            weakref.finalize(self, self._queue.put, None)
            threading.Thread(target=_serve, args=(self._queue,), daemon=True, name="octavo-masks").start()
        pending = PendingMasks(requests, rows)
        self._queue.put(pending.work)
        return pending

    def join(self, pending: PendingMasks) -> Masks:
        """Wait for masks, with a bound."""
        masks, in_time = pending.wait()
        if not in_time:
            self.close()
        return masks

    def close(self) -> None:
        """Let the thread end, after what it is at."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()


def _masks_of(requests: Seq[RowRequest], rows: list[int]) -> Masks:
    matchers: list[Matcher] = [request.grammar for request in requests if request.grammar is not None]
    bits = next_tokens(matchers)
    masks = Masks(rows, bits)
    words = bits.view(np.uint32)
    for index, (row, request, matcher) in enumerate(zip(rows, requests, matchers, strict=True)):
        if error := matcher.error:
            masks.errors[row] = f"structured_outputs: {error}"
        elif not bits[index].any():
            if matcher.can_end:
                masks.ended.add(row)
            else:
                masks.errors[row] = DEAD_END
        elif matcher.can_end:  # the sampler bans these before min_tokens
            stops = request.settings.stop_ids
            np.bitwise_or.at(words[index], stops // 32, np.uint32(1) << (stops % 32).astype(np.uint32))
    return masks

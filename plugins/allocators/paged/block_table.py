"""The blocks of one sequence in the order of its positions, and their copy as an array for the input builder.

Must not know: reference counts, pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_EMPTY = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class BlockTable:
    """`blocks` is the truth; `array` follows it when somebody reads, from the first entry that changed."""

    blocks: list[int] = field(default_factory=list)
    num_filled: int = 0  # positions committed
    dirty_from: int = 0  # the array's entries before this one are the list's
    array: npt.NDArray[np.int32] = field(default_factory=lambda: _EMPTY)
    view: npt.NDArray[np.int32] = field(default_factory=lambda: _EMPTY)  # the part that is used, as it was last read

    def replace(self, index: int, block: int) -> None:
        """Another block takes this place."""
        self.blocks[index] = block
        self.dirty_from = min(self.dirty_from, index)

    def read(self) -> tuple[npt.NDArray[np.int32], int]:
        """A view of the table and the first entry that changed since the last read. The array doubles when it is full."""
        length, dirty = len(self.blocks), self.dirty_from
        if dirty < length:  # else nothing changed: most rows of most steps
            if length > len(self.array):
                grown = np.empty(max(8, length, 2 * len(self.array)), dtype=np.int32)
                grown[:dirty] = self.array[:dirty]
                self.array = grown
            self.array[dirty:length] = self.blocks[dirty:]
            self.dirty_from = length
            self.view = self.array[:length]
        return self.view, dirty

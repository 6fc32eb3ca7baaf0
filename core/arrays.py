"""Names for the numpy arrays that modules hand each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

"""The native library: C++ for CPUs, in the folder of this file; `setup.py` builds it (docs/adr/0012-native-library.md).

`absence()` answers at once and without torch whether it was built; `load()` loads it. Must not know: ops, kernels, models.
"""

from octavo.core.native.library import (
    AttentionCall,
    Block,
    BlockInputs,
    BlockOutputs,
    Library,
    NativeAttention,
    PackedLinear,
    load,
)
from octavo.core.native.presence import absence

__all__ = ["AttentionCall", "Block", "BlockInputs", "BlockOutputs", "Library", "NativeAttention", "PackedLinear", "absence", "load"]

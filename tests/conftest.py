"""Where there is no GPU, Triton's functions run in its interpreter. Triton decides that when it is imported, so it is said here, first.

The environment decides where it says something: TRITON_INTERPRET=0 has Triton compile, =1 interpret even beside a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL, AMD; asking torch would take seconds

if not any(Path(device).exists() for device in GPU_DEVICES):
    os.environ.setdefault("TRITON_INTERPRET", "1")

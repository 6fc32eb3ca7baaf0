"""What must be so before anything is imported.

Where there is no GPU, Triton's functions run in its interpreter. Triton decides that when it is imported. The environment decides where it
says something: TRITON_INTERPRET=0 has Triton compile, =1 interpret even beside a GPU.

Ctrl-C is heard: a shell that starts something in the background has it ignored, and tests about Ctrl-C would wait for ever.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL, AMD; asking torch would take seconds

if not any(Path(device).exists() for device in GPU_DEVICES):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

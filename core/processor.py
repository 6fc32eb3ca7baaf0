"""What the machine calls its processor, and how wide its vectors are.

Must not know: torch, what is measured on it.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

# The widest comes first. Hypervisors shorten names: an "AMD EPYC" with AVX-512 and one without are not the same machine.
VECTORS = {"amx_bf16": "AVX-512 bf16, AMX", "avx512_bf16": "AVX-512 bf16", "avx512f": "AVX-512", "avx2": "AVX2"}


@cache
def cpu_name() -> str:
    """As the system names it, with its vector extension: "AMD EPYC (AVX2)"."""
    try:
        named = describe(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        named = ""
    return named or platform.processor() or platform.machine()


def describe(cpuinfo: str) -> str:
    """Of the first processor in Linux's /proc/cpuinfo; empty where it has no name there, as on Arm."""
    first = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in first}
    name, flags = fields.get("model name", ""), fields.get("flags", "").split()
    widest = next((label for flag, label in VECTORS.items() if flag in flags), "")
    return f"{name} ({widest})" if name and widest else name

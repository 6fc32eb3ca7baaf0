"""`triton_paged` becomes native code for three GPUs, none of which need be there: matrix instructions of its own type, nothing spilled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("triton_compile.py")
KIB = 1024
# What one program may take at most.
SHARED = {"cuda:80": 163 * KIB, "cuda:90": 227 * KIB, "hip:gfx942": 64 * KIB}
SMALLEST_SHARED = 99 * KIB  # of cuda:86 and 89, which run what is compiled for cuda:80
REGISTERS = {"cuda:80": 255, "cuda:90": 255, "hip:gfx942": 512}
# In fp32 no matrix instruction of CUDA is exact: TF32 rounds.
MATRIX = {
    ("cuda", "bfloat16"): ".BF16",
    ("cuda", "float16"): ".F32",
    ("cuda", "float32"): None,
    ("hip", "bfloat16"): "bf16",
    ("hip", "float16"): "f16",
    ("hip", "float32"): "x4_f32|x2_f32",
}

FAST = [("cuda:90", "bfloat16", 64), ("hip:gfx942", "bfloat16", 64)]
ALL = [(target, dtype, size) for target in SHARED for dtype in ("bfloat16", "float16", "float32") for size in (64, 80, 128, 256)]


def compiled(target: str, dtype: str, size: int, cache: Path) -> list[dict[str, Any]]:
    """What the binaries of the three functions hold."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(SCRIPT), target, dtype, str(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("target", "dtype", "size"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in ALL], ids=str
)
def test_native_code(target: str, dtype: str, size: int, tmp_path: Path) -> None:
    """Every function fits the GPU without spilling; both tiles multiply in their own type, fp32 without rounding to TF32."""
    rows = compiled(target, dtype, size, tmp_path)
    assert [row["function"] for row in rows] == ["attend_tiles, decoding", "attend_tiles", "write_slots"]
    print("\n| target | type | head | function | registers | spills | shared bytes | matrix instructions |")
    expected = MATRIX[target.partition(":")[0], dtype]
    for row in rows:
        print(
            "|",
            " | ".join(str(row[name]) for name in ("target", "dtype", "size", "function", "registers", "spills", "shared", "matrix")),
            "|",
        )
        assert (row["spills"], row["stack"]) == (0, 0), row
        assert 0 < row["registers"] <= REGISTERS[target], row
        assert row["shared"] <= min(SHARED[target], SMALLEST_SHARED), row
        if row["function"] == "write_slots" or expected is None:
            assert row["matrix"] == [], row
        else:
            assert row["matrix"], row
            assert all(instruction.endswith(tuple(expected.split("|"))) for instruction in row["matrix"]), row

"""The plain level, cross-compiled for Arm and run under QEMU, has the bits that it has here, where other tests compare it with torch."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE, ARM = ("g++", []), ("aarch64-linux-gnu-g++", ["qemu-aarch64"])
FLAGS = ["-std=c++17", "-O2", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-Wno-unknown-pragmas"]
PLAIN = ["-DOCTAVO_LEVEL=plain", "-DOCTAVO_ABI=0", f"-I{ROOT / 'core/native'}"]
TOOLS = [HERE[0], ARM[0], *ARM[1]]
missing = [tool for tool in TOOLS if shutil.which(tool) is None]


def printed(compiler: str, runner: list[str], folder: Path) -> list[str]:
    """What the program prints, built with this compiler."""
    sources = [*sorted((ROOT / "core/native").glob("*.cpp")), Path(__file__).with_name("other_processor.cpp")]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.{compiler}.o"
        subprocess.run([compiler, *FLAGS, *PLAIN, "-c", str(source), "-o", str(target)], check=True, timeout=300)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    program = folder / compiler
    subprocess.run([compiler, "-fopenmp", "-static", *map(str, objects), "-o", str(program)], check=True, timeout=300)
    done = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True, timeout=600)
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (on Debian: g++ g++-aarch64-linux-gnu qemu-user)")
def test_arm_has_the_same_bits(tmp_path: Path) -> None:
    """Linears of weights and of codes, norms, RoPE and attention, in three types, with two threads."""
    here, arm = printed(*HERE, tmp_path), printed(*ARM, tmp_path)
    assert len(here) == 3 * (4 * 7 + 2 * 4 * 2 + 2 * 4) + 1
    assert here[-1] == "runs plain 1, avx9 0"
    different = [line.split(" ")[:-1] for line, other in zip(here, arm, strict=True) if line != other]
    assert different == []

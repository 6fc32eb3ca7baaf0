"""Maps the top-level folders into one package, and builds the native library where there is a C++ compiler. All else is in pyproject.toml.

`core/x.py` on disk is `octavo.core.x` in Python. The library (docs/adr/0012-native-library.md) needs a compiler and nothing else: every
source in core/native is compiled once for each level of processors, and all objects become one shared library beside them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDERS = {"octavo": "src/octavo"} | {f"octavo.{folder}": folder for folder in ("core", "plugins", "server", "bench")}

NATIVE = Path("core/native")
NOTE = "native_build.txt"  # beside the library: why it could not be built; octavo.core.native.absence() quotes its first line
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
AMX_BF16 = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"]
X86_LEVELS = {"avx2": ["-mavx2", "-mfma", "-mf16c"], "avx512": AVX512, "avx512_bf16": AVX512_BF16, "amx_bf16": AMX_BF16}
LEVELS = {"plain": []} | (X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else {})
# What a compiler and its assembler must know besides the flags: the newest instruction of a level.
PROBES = {
    "avx2": "__m256 probe(__m256 a, __m128i b) { return _mm256_fmadd_ps(a, a, _mm256_cvtph_ps(b)); }",
    "avx512": "__m512i probe(__m512i a) { return _mm512_maskz_mov_epi16(1, _mm512_mullo_epi64(a, a)); }",
    "avx512_bf16": "__m512 probe(__m512 a) { return _mm512_dpbf16_ps(a, (__m512bh)a, (__m512bh)a); }",
    "amx_bf16": "void probe() { _tile_dpbf16ps(0, 1, 2); }",
}
FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"]
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC's own intrinsics raise them


def compiler() -> list[str]:
    """The C++ compiler and its own arguments; empty: there is none, or it is not wanted."""
    if os.environ.get("OCTAVO_NO_NATIVE", "0") not in ("", "0"):
        return []
    asked = shlex.split(os.environ.get("CXX", ""))
    names = [asked] if asked else [["g++"], ["c++"]]  # clang++ brings an OpenMP of its own, whose threads would fight torch's
    return next((name for name in names if shutil.which(name[0])), [])


class CompileError(Exception):
    """The compiler failed: the first line says how, the others are what it printed."""


def compiled(command: list[str]) -> None:
    """Run a compiler, whose warnings go to stderr. Raises CompileError."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode == 0:
        print(done.stdout, end="", file=sys.stderr)
        return
    lines = done.stdout.strip().splitlines()
    told = next((line.strip() for line in lines if "error" in line), lines[-1].strip() if lines else "it said nothing")
    raise CompileError("\n".join([f"{command[0]} failed with status {done.returncode}: {told}", "", shlex.join(command), *lines]))


def usable_levels(common: list[str], folder: Path) -> dict[str, list[str]]:
    """The levels whose flags and instructions the compiler knows; each that it does not is told, and left out."""
    usable = {"plain": LEVELS["plain"]}
    for level, flags in list(LEVELS.items())[1:]:
        probe = folder / f"probe_{level}.cpp"
        probe.write_text(f"#include <immintrin.h>\n{PROBES[level]}\n", encoding="utf-8")
        try:
            compiled([*common, *flags, "-c", str(probe), "-o", str(probe.with_suffix(".o"))])
            usable[level] = flags
        except CompileError as error:
            told = str(error).partition("\n")[0]
            print(f"octavo: the native library goes without {level}, which this compiler does not know: {told}", file=sys.stderr)
    return usable


def fingerprint() -> str:
    """What tells these sources from others, in hex: core/native/library.py computes it anew from the sources that lie beside it."""
    found = hashlib.sha256()
    for source in sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")]):
        found.update(source.name.encode() + b"\0" + source.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return found.hexdigest()[:15]


class BuildNative(build_ext):
    """Compiles each source for each level. What cannot be built is told and left out: Octavo runs without."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library is no Python module: its name says nothing of a Python version."""
        return f"{os.path.join(*fullname.split('.'))}.so"

    def copy_extensions_to_source(self) -> None:
        """In place too, a failed build leaves its reason and no library of an earlier one, a good build no reason."""
        super().copy_extensions_to_source()
        for extension in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(extension.name))
            if built.exists():
                (NATIVE / NOTE).unlink(missing_ok=True)
            else:
                (NATIVE / built.name).unlink(missing_ok=True)
                shutil.copyfile(built.with_name(NOTE), NATIVE / NOTE)

    def build_extension(self, extension: Extension) -> None:
        """One object a source and level, as many at a time as there are cores, then one library."""
        objects = Path(self.build_temp) / "native"
        objects.mkdir(parents=True, exist_ok=True)
        extra = shlex.split(os.environ.get("OCTAVO_NATIVE_FLAGS", ""))
        common = [*compiler(), *FLAGS, *extra, f"-DOCTAVO_ABI=0x{fingerprint()}"]
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        note = target.with_name(NOTE)
        note.unlink(missing_ok=True)
        try:
            levels = usable_levels(common, objects)
            jobs = {
                objects / f"{source.stem}.{level}.o": [*common, *flags, f"-DOCTAVO_LEVEL={level}", "-c", str(source), "-o"]
                for source in map(Path, extension.sources)
                for level, flags in (levels.items() if source.stem != "processor" else [("plain", [])])
            }
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda job: compiled([*job[1], str(job[0])]), jobs.items()))
            compiled([*common, "-shared", *map(str, jobs), "-o", str(target)])
        except (CompileError, OSError) as error:
            target.unlink(missing_ok=True)
            note.write_text(f"{error}\n", encoding="utf-8")
            print(f"octavo: the native library could not be built, torch ops and sdpa will serve on a CPU: {error}", file=sys.stderr)


class NativeWheel(bdist_wheel):
    """A wheel with the library fits one platform and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform>, or py3-none-any."""
        python, abi, plat = super().get_tag()
        return ("py3", "none", plat) if self.distribution.has_ext_modules() else (python, abi, plat)


extensions = []
if compiler():
    sources, headers = (sorted(map(str, NATIVE.glob(pattern))) for pattern in ("*.cpp", "*.h"))
    extensions.append(Extension("octavo.core.native.liboctavo", sources, depends=headers, optional=True))
else:
    print("octavo: built without the native library (no C++ compiler, or OCTAVO_NO_NATIVE is set)", file=sys.stderr)

setup(
    package_dir=FOLDERS,
    packages=[*FOLDERS, *(f"{name}.{sub}" for name, folder in FOLDERS.items() for sub in find_packages(folder))],
    ext_modules=extensions,
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
)

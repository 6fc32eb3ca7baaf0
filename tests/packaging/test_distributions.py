"""Wheel, sdist and editable install hold the whole package, nothing else, and work away from the checkout."""

from __future__ import annotations

import email
import platform
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # they compile the native library

LIBRARY = "octavo/core/native/liboctavo.so"


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def test_the_wheel_holds_every_module_and_nothing_else(distributions, packaged, root):
    """Each .py of the five folders is under octavo/, data and the native library too, and besides there is only metadata."""
    files = {name for name in names(distributions.wheel) if ".dist-info/" not in name}
    presets = {f"octavo/{file.relative_to(root)}" for file in root.glob("bench/ablation/presets/*.toml")}
    assert files == {*packaged.values(), *presets, "octavo/py.typed", LIBRARY}


def test_the_wheel_is_for_this_platform_and_any_python(distributions):
    """The library calls nothing of Python, so one wheel a platform is enough."""
    assert re.fullmatch(r"octavo-.*-py3-none-(?!any)\w+\.whl", distributions.wheel.name)


def test_the_library_needs_no_python_and_no_torch(installed):
    """Of shared libraries it asks for the compiler's and OpenMP's alone, and each level's functions are there."""
    code = (
        "from octavo.core.native import absence, load\n"
        "from octavo.core.native.library import levels\n"
        "print(absence(), levels()[0], load('plain').level)"
    )
    assert installed.python(code) == "None plain plain"
    (library,) = installed.folder.rglob("liboctavo.so")
    needed = run("readelf", "--dynamic", library, cwd=installed.folder)
    symbols = run("nm", "--demangle", library, cwd=installed.folder)
    shared = [line for line in symbols.splitlines() if re.search(r"^\S+ [VWu] ", line)]
    assert shared == [], "one copy for all levels, which may be that of a level that the processor lacks"
    assert set(re.findall(r"NEEDED.*\[(\w+)", needed)) <= {"libgomp", "libgcc_s", "libstdc", "libm", "libc", "ld"}


ABSENCE = "from octavo.core.native import absence; print(absence())"


@pytest.mark.parametrize(("variable", "value"), [("OCTAVO_NO_NATIVE", "1"), ("CXX", "/no/such/compiler")])
def test_octavo_installs_without_a_compiler(environment, tree, variable, value):
    """Not wanted, or not there: the install succeeds, the library is absent, and it is said why and what to do."""
    environment.install(tree, **{variable: value})
    reason = environment.python(ABSENCE)
    assert "there was no C++ compiler when it was built, or OCTAVO_NO_NATIVE was set; install one" in reason
    assert "--no-cache-dir" in reason
    assert "octavo" in environment.command("--help")
    assert list(environment.folder.rglob("liboctavo.so")) == []


@pytest.mark.parametrize("editable", [False, True])
def test_octavo_installs_where_the_compiler_fails(environment, tree, editable):
    """What the compiler said is kept beside where the library would be and quoted; a library of an earlier build does not stay."""
    (tree / "core/native/norm.cpp").write_text("#error no norm today\n")
    (tree / "core/native/liboctavo.so").write_bytes(b"of an earlier build")
    environment.install(*["--editable"] * editable, tree)
    reason = environment.python(ABSENCE)
    told = r"could not be compiled when this Octavo was built: \S+ failed with status 1: .*norm.cpp:1:2: error: .*no norm"
    assert re.search(told, reason)
    assert "no C++ compiler" not in reason and "--no-cache-dir" in reason
    folder = tree / "core/native" if editable else environment.folder
    assert list(folder.rglob("liboctavo.so")) == []
    (note,) = folder.rglob("native_build.txt")
    assert str(note) in reason and "norm.cpp" in note.read_text()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have one level")
def test_a_level_that_the_compiler_does_not_know_is_left_out(tree, tmp_path):
    """An old compiler costs a level and those that need it, with a message; the others are built."""
    old = tmp_path / "old-g++"
    old.write_text(
        '#!/bin/sh\ncase " $* " in *" -mavx512bf16 "*) echo "error: unrecognized option -mavx512bf16" >&2; exit 1;; esac\nexec g++ "$@"\n'
    )
    old.chmod(0o755)
    told = run("sh", "-c", f"{sys.executable} setup.py -q build_ext --build-lib built --build-temp built 2>&1", cwd=tree, CXX=str(old))
    assert "the native library goes without avx512_bf16, which this compiler does not know: " in told
    assert "unrecognized option -mavx512bf16" in told
    functions = run("nm", "--dynamic", tree / "built" / LIBRARY, cwd=tree)
    levels = ("plain", "avx2", "avx512", "avx512_bf16", "amx_bf16")
    built = [level for level in levels if re.search(rf" T octavo_norm_{level}$", functions, re.M)]
    assert built == ["plain", "avx2", "avx512"]


def test_only_octavo_is_importable(distributions, installed):
    """A wheel that put `core` or `server` into site-packages would collide with others."""
    with zipfile.ZipFile(distributions.wheel) as wheel:
        (top_level,) = (name for name in wheel.namelist() if name.endswith("top_level.txt"))
        assert wheel.read(top_level).decode().split() == ["octavo"]
    found = installed.python(
        "from importlib.util import find_spec\n"
        "print([n for n in ('octavo', 'core', 'plugins', 'server', 'bench', 'src', 'tests', 'setup') if find_spec(n)])"
    )
    assert found == "['octavo']"


def test_the_sdist_builds_the_same_wheel(distributions):
    """What building needs is in the sdist, and the wheel made from it has the same files."""
    with tarfile.open(distributions.sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "core/__init__.py", "src/octavo/py.typed"} <= files
    assert {"core/native/vec.h", "core/native/norm.cpp", "core/native/processor.cpp"} <= files
    assert names(distributions.wheel_of_sdist) == names(distributions.wheel)


def test_the_metadata_says_what_the_project_says(distributions, root):
    """Version from its one source, licence with its file, the readme, and the Python that is needed."""
    version: dict[str, str] = {}
    exec((root / "src/octavo/_version.py").read_text(), version)
    with zipfile.ZipFile(distributions.wheel) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(path))
        licence = wheel.read(path.replace("METADATA", "licenses/LICENSE")).decode()
    assert metadata["Version"] == version["__version__"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (root / "LICENSE").read_text()
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload().strip() == (root / "README.md").read_text().strip()
    assert set(metadata.get_all("Provides-Extra")) == {"testing", "bench", "dev"}


def test_the_wheel_runs_away_from_the_checkout(installed):
    """Import and command work in an environment that has never seen the repository."""
    file = installed.python("import octavo, octavo.core.errors; print(octavo.core.errors.__file__)")
    assert Path(file).is_relative_to(installed.folder)
    assert "octavo" in installed.command("--help")


def test_the_built_in_plugins_are_entry_points(installed, root):
    """The installed distribution declares in group `octavo` what pyproject.toml does."""
    found = installed.python(
        "from importlib.metadata import entry_points\nprint(sorted((e.name, e.value) for e in entry_points(group='octavo')))"
    )
    assert found == str(sorted(project(root)["entry-points"]["octavo"].items()))


def test_an_editable_install_sees_new_modules(environment, tree):
    """Packages and modules added after the install are importable at once, in mapped folders too; the library lies in the tree."""
    environment.install("--editable", tree)
    assert (tree / "core/native/liboctavo.so").exists()
    for module in ("core/fresh/__init__.py", "core/fresh/leaf.py", "plugins/schedulers/fresh.py", "src/octavo/fresh.py"):
        (tree / module).parent.mkdir(exist_ok=True)
        (tree / module).write_text("here = True\n")
    imports = "import octavo.fresh, octavo.core.fresh.leaf, octavo.plugins.schedulers.fresh as last; print(last.__file__)"
    assert environment.python(imports) == str(tree / "plugins/schedulers/fresh.py")
    assert "octavo" in environment.command("--help")

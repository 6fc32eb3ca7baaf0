"""A copy of the tree, the distributions built from it, and clean environments to install them in, all without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MAPPING = {"src/octavo": "octavo"} | {folder: f"octavo/{folder}" for folder in ("core", "plugins", "server", "bench")}
UNTRACKED = shutil.ignore_patterns(
    ".git", ".venv*", ".typings", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "*.so", "native_build.txt"
)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What `command` prints, run with an environment in which nothing leads back to the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV", "OCTAVO_"))}
    environment |= {"OCTAVO_NATIVE_FLAGS": "-O0"} | variables  # whether it is built is asked here, not how fast it is
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Environment(NamedTuple):
    """A virtual environment that sees every installed package but Octavo."""

    folder: Path

    def install(self, *arguments: str | Path, **variables: str) -> None:
        pip = ("-m", "pip", "--python", self.folder / "bin" / "python", "install", "--quiet", "--no-index", "--no-deps")
        run(sys.executable, *pip, "--no-build-isolation", *arguments, cwd=self.folder, **variables)

    def python(self, code: str) -> str:
        """What `code` prints, run outside the checkout."""
        return run(self.folder / "bin" / "python", "-c", code, cwd=self.folder).strip()

    def command(self, *arguments: str) -> str:
        """What `octavo ARGUMENTS` prints, run outside the checkout."""
        return run(self.folder / "bin" / "octavo", *arguments, cwd=self.folder)


class Distributions(NamedTuple):
    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def packaged() -> dict[str, str]:
    """Every Python file of the package: path in the checkout -> path in the wheel."""
    return {
        str(file.relative_to(ROOT)): f"{target}/{file.relative_to(ROOT / folder)}"
        for folder, target in MAPPING.items()
        for file in (ROOT / folder).rglob("*.py")
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the checkout that a test may change, without what git does not track."""
    return Path(shutil.copytree(ROOT, tmp_path / "tree", ignore=UNTRACKED))


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Wheel and sdist of the tree, and the wheel that the sdist makes."""
    work = tmp_path_factory.mktemp("distributions")
    shutil.copytree(ROOT, work / "tree", ignore=UNTRACKED)
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", work / "dist", "tree", cwd=work)
    (sdist,) = (work / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", work / "again", unpacked, cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    (wheel_of_sdist,) = (work / "again").glob("*.whl")
    return Distributions(wheel, sdist, wheel_of_sdist)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A fresh virtual environment: links to the installed packages stand in for downloads."""
    return _environment(tmp_path)


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment in which the wheel is installed."""
    environment = _environment(tmp_path_factory.mktemp("installed"))
    environment.install(distributions.wheel)
    return environment


def _environment(work: Path) -> Environment:
    folder, links = work / "venv", work / "packages"
    venv.create(folder, with_pip=False)
    links.mkdir()
    for path in map(Path, sys.path):
        if path.name in ("site-packages", "dist-packages"):
            for entry in path.iterdir():
                if "octavo" not in entry.name and entry.suffix != ".pth" and not (links / entry.name).exists():
                    (links / entry.name).symlink_to(entry)
    purelib = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    Path(purelib, "packages.pth").write_text(f"{links}\n")
    return Environment(folder)

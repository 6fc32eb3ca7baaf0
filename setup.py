"""Maps the top-level folders into one package: `core/x.py` on disk is `octavo.core.x` in Python. All else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = {"octavo": "src/octavo"} | {f"octavo.{folder}": folder for folder in ("core", "plugins", "server", "bench")}

setup(
    package_dir=FOLDERS,
    packages=[*FOLDERS, *(f"{name}.{sub}" for name, folder in FOLDERS.items() for sub in find_packages(folder))],
)

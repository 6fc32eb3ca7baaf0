"""Whether the native library was built. Must not import torch, nor load it: plugin lists ask here."""

from __future__ import annotations

import os
from pathlib import Path


def path() -> Path:
    """Where the library lies: beside this file, or where OCTAVO_NATIVE_LIBRARY says (the sanitizer build is there)."""
    return Path(os.environ.get("OCTAVO_NATIVE_LIBRARY") or Path(__file__).with_name("liboctavo.so"))


def absence() -> str | None:
    """Why there is no library to load, in a sentence that says what to do; None: there is one."""
    if path().is_file():
        return None
    if named := os.environ.get("OCTAVO_NATIVE_LIBRARY"):
        return f"needs the native library, but OCTAVO_NATIVE_LIBRARY names {named}, which is no file"
    return (
        "needs the native library, which this installation of Octavo lacks: there was no C++ compiler when it was built, or "
        "OCTAVO_NO_NATIVE was set; install one (on Debian and Ubuntu: apt install g++) and install Octavo again"
    )

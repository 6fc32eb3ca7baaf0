"""Whether the native library was built and can be used. Must not import torch: plugin lists ask here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from octavo.core.errors import ConfigError


def path() -> Path:
    """Where the library lies: beside this file, or where OCTAVO_NATIVE_LIBRARY says (the sanitizer build is there)."""
    return Path(os.environ.get("OCTAVO_NATIVE_LIBRARY") or Path(__file__).with_name("liboctavo.so"))


def absence() -> str | None:
    """Why the library cannot be used, in a sentence that says what to do; None: it can.

    Without torch in the process only whether it is there: it must be loaded after torch. With torch (an engine is built) it is loaded too,
    so that `auto` goes without one that is broken, stale or of another system.
    """
    return missing() or (_fault() if "torch" in sys.modules else None)


def missing() -> str | None:
    """Why there is no library to load, in a sentence that says what to do; None: there is a file."""
    if path().is_file():
        return None
    if named := os.environ.get("OCTAVO_NATIVE_LIBRARY"):
        return f"needs the native library, but OCTAVO_NATIVE_LIBRARY names {named}, which is no file"
    again = "install Octavo again with pip's --no-cache-dir, lest it takes the wheel that it has"
    if told := _failure():
        return (
            f"needs the native library, which could not be compiled when this Octavo was built: {told} (all of it is in {_note()}). "
            f"Mend that, and {again}"
        )
    return (
        "needs the native library, which this installation of Octavo lacks: there was no C++ compiler when it was built, or "
        f"OCTAVO_NO_NATIVE was set; install one (on Debian and Ubuntu: apt install g++) and {again}"
    )


def _fault() -> str | None:
    """Why a library that is there cannot be loaded; None: it can."""
    from octavo.core.native.library import levels, load

    try:
        load(levels()[-1])
    except ConfigError as error:
        return f"needs the native library, but {error}"
    return None


def _note() -> Path:
    return Path(__file__).with_name("native_build.txt")  # setup.py writes it where a compiler failed


def _failure() -> str | None:
    """How the compiler failed, in a line; None: it didn't, or was never asked."""
    try:
        return _note().read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip() or None
    except OSError:
        return None

"""The `octavo` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from octavo._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own; returns the exit status."""
    parser = argparse.ArgumentParser(prog="octavo", description="A plugin-based engine for LLM inference.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    parser.parse_args(argv)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

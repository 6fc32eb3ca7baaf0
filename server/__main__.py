"""`python -m octavo.server`: the same as `octavo serve`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from importlib import import_module

    sys.exit(import_module("octavo.cli").main(["serve", *sys.argv[1:]]))

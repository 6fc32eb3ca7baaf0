"""`python -m octavo` and the `octavo` command."""

from __future__ import annotations

import sys

from octavo.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""How long `octavo plugins` takes, as a whole process, and whether it imports torch. `python -m octavo.bench.command_start`."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

COMMAND = [sys.executable, "-m", "octavo", "plugins"]
HEAVY = ("torch", "numpy", "transformers", "triton")


def main(argv: Sequence[str] | None = None) -> int:
    """Print median, best and worst of several runs, and which heavy packages were loaded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args(argv)
    seconds = []
    for _ in range(args.runs + 1):  # the first one warms the disk
        begun = time.perf_counter()
        subprocess.run(COMMAND, stdout=subprocess.DEVNULL, check=True, timeout=60)
        seconds.append(time.perf_counter() - begun)
    median, best, worst = statistics.median(seconds[1:]), min(seconds[1:]), max(seconds[1:])
    print(f"octavo plugins: median {median:.3f} s, best {best:.3f} s, worst {worst:.3f} s of {args.runs} runs")
    code = f"import sys, octavo.cli; octavo.cli.main(['plugins']); print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    print(f"of {', '.join(HEAVY)} it imported: {done.stderr.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

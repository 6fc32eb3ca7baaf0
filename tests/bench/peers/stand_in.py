"""An engine for tests that counts on from a prompt's first token, and takes, fails and forgets as its options say.

What it answers from its cache begins a thousand later.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from .loop import Engine, TokenIds  # its package has the folder of the workers too


class StandIn(Engine):
    """`seconds` a call; in call `ends_at` it says `words` and ends, in call `hangs_at` it does not answer; `short` by a token."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        if "refuses" in options:
            raise ValueError(options["refuses"])
        print("noise on standard output")
        self._options, self._calls, self._cached = options, 0, False

    def facts(self) -> dict[str, Any]:
        told = {"folder": os.listdir(), "variables": dict(os.environ)} if "tells" in self._options else {}
        threads = int(os.environ["OMP_NUM_THREADS"])
        return {"versions": {"stand-in": "1.0"}, "threads": threads, "stack": {"a": "b", "c": "d"}} | told

    def generate(self, prompts: TokenIds, lengths: list[int]) -> TokenIds:
        self._calls += 1
        if self._calls == self._options.get("ends_at"):
            print(self._options["words"], file=sys.stderr, flush=True)
            os._exit(7)
        if self._calls == self._options.get("hangs_at"):
            time.sleep(60)
        until = time.perf_counter() + self._options["seconds"]
        while time.perf_counter() < until:  # at work
            pass
        left_out, later = self._options.get("short", 0), 1000 * self._cached
        self._cached = True
        return [[prompt[0] + later + i for i in range(length - left_out)] for prompt, length in zip(prompts, lengths, strict=True)]

    def forget(self) -> None:
        self._cached = False

    def kv_memory(self) -> Any:
        import numpy as np

        self.pool = np.zeros(1 << 24, dtype=np.uint8)  # of which only a sixteenth is written
        self.pool[: 1 << 20] = 1
        yield self.pool.ctypes.data, self.pool.nbytes


ENGINE = StandIn

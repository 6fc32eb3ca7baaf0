"""What a worker and its parent say to each other: a JSON object a line, on standard input and output, one answer for each question.

    {"do": "load", "model": PATH, "options": {...}}        -> {"facts": {...}}
    {"do": "generate", "prompts": [[id]], "lengths": [n]}  -> {"seconds": s, "token_ids": [[id]]}
    {"do": "forget"}                                       -> {}    cached prefixes, and the memory's peak so far
    {"do": "memory"}                                       -> {"resident": n, "peak": n, "start_peak": n, "kv": n or null: unknown}

What cannot be done is answered by {"error": TEXT}. In between the process waits for a line, and uses no CPU. Answers are greedy, EOS is
ignored. Whatever else an engine prints goes to standard error.
Must not know: any engine.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import traceback
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from typing import Any

TokenIds = list[list[int]]


class Engine(ABC):
    """A loaded engine."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Versions, threads, and settings that say what was measured."""

    @abstractmethod
    def generate(self, prompts: TokenIds, lengths: list[int]) -> TokenIds:
        """All at once: for each prompt exactly so many greedy tokens, past EOS."""

    def forget(self) -> None:
        """Drop cached prefixes. Raises where they stay."""

    def kv_memory(self) -> Iterable[tuple[int, int]] | None:
        """Address and bytes of each part of the KV pool; None: nobody knows."""
        return None


def serve(load: Callable[[str, dict[str, Any]], Engine]) -> None:
    """Answer until standard input ends. `load` makes the engine from the model's path and its options."""
    questions, answers = sys.stdin, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # an engine's own prints, those of C code too, must not be taken for answers
    sys.stdout = sys.stderr
    engine: Engine | None = None
    start_peak = 0
    for line in questions:
        question = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if question["do"] == "load":
                engine = load(question["model"], question["options"])
                answer = {"facts": engine.facts()}
            elif engine is None:
                raise ValueError("nothing was loaded")
            elif question["do"] == "generate":
                answer = _timed(engine, question["prompts"], question["lengths"])
            elif question["do"] == "forget":
                engine.forget()
                start_peak = max(start_peak, _memory("VmHWM"))
                _forget_peak()
            elif question["do"] == "memory":
                answer = {
                    "resident": _memory("VmRSS"),
                    "peak": _memory("VmHWM"),
                    "start_peak": start_peak,
                    "kv": _resident(engine.kv_memory()),
                }
            else:
                raise ValueError(f"unknown question {question['do']!r}")
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _timed(engine: Engine, prompts: TokenIds, lengths: list[int]) -> dict[str, Any]:
    gc.collect()
    begun = time.perf_counter()
    made = engine.generate(prompts, lengths)
    seconds = time.perf_counter() - begun
    found = [len(ids) for ids in made]
    if found != lengths:
        wrong = next(i for i, (have, want) in enumerate(zip(found, lengths, strict=True)) if have != want)
        raise ValueError(f"prompt {wrong} has {found[wrong]} tokens, not the {lengths[wrong]} asked for")
    return {"seconds": seconds, "token_ids": made}


def _memory(name: str) -> int:
    """Bytes, by their name in /proc/self/status; elsewhere the peak, whatever is asked for."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # proc(5): resets the peak resident set size
    except OSError:
        pass


def _resident(parts: Iterable[tuple[int, int]] | None) -> int | None:
    """Bytes of these parts that lie in memory: a pool takes room only where it was written to. See pagemap in Linux's documentation."""
    if parts is None:
        return None
    page, found = os.sysconf("SC_PAGE_SIZE"), 0
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            for address, size in parts:
                first, last = address // page, (address + size - 1) // page
                pagemap.seek(first * 8)
                entries = array("Q", pagemap.read((last - first + 1) * 8))
                found += sum(entry >> 63 for entry in entries)  # bit 63: present
    except OSError:
        return None
    return found * page

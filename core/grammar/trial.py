"""A grammar from outside is compiled in another process first, where it can do no harm.

llguidance bounds most of its work, yet a chain of references ends its process with a stack overflow, and an intersection of expressions
makes it search without end (docs/adr/0010). So a helper process, started with the first grammar, forks for each one: the fork has little
stack, and limits of memory and time. What survives there is compiled here too, on a larger stack.

The helper ends when its input does. Must not know: requests, what a grammar is for.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from octavo.core.clock import MonotonicClock
from octavo.core.grammar.engine import new_matcher, new_tokenizer, problem_of

STACK_BYTES = 1024 * 1024  # every thread that will run the grammar has more
MEMORY_BYTES = 512 * 1024 * 1024  # beyond what the helper has
CPU_SECONDS = 2
PATIENCE = 10  # times that long on the clock, for machines that are busy
START_SECONDS = 60.0
DONE = b"done "  # what a trial says that came to its end, before the error


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a grammar: an error in the grammar engine's words ("" if none), and the bytes that it took."""

    error: str
    num_bytes: int


class Trial:
    """The helper process of one vocabulary. Not thread-safe."""

    def __init__(self, table: list[bytes], end: int, *, cpu_seconds: int = CPU_SECONDS) -> None:
        """Of a vocabulary: the bytes of its entries, and which of them ends an output."""
        self._cpu_seconds = cpu_seconds
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo.core.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._send((table, end, cpu_seconds))
            self._receive(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def judge(self, grammar: str) -> Verdict:
        """Raises OSError or EOFError where the helper itself is gone: make another."""
        self._send(grammar)
        verdict: Any = self._receive(self._cpu_seconds * PATIENCE + START_SECONDS)
        return Verdict(*verdict)

    def close(self) -> None:
        """End the helper."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _send(self, message: object) -> None:
        if self._process.stdin is None:
            raise EOFError("the helper has no input")
        _write(self._process.stdin, message)

    def _receive(self, seconds: float) -> object:
        pipe = self._process.stdout
        if pipe is None or not select.select([pipe], [], [], seconds)[0]:
            raise EOFError(f"the helper said nothing for {seconds} s")
        return _read(pipe)


def _write(pipe: IO[bytes], message: object) -> None:
    data = pickle.dumps(message)
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> object:
    """Raises EOFError where the other end is gone."""
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError("the other process is gone")
    return pickle.loads(pipe.read(*struct.unpack("<Q", header)))


# ------------------------------------------------------------ in the helper


def main() -> None:
    """Serve: a vocabulary and the seconds of a trial, then grammars."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    begin: Any = _read(requests)
    table, end, cpu_seconds = begin
    tokenizer = new_tokenizer(table, end)
    _write(answers, "ready")
    while True:
        try:
            grammar = _read(requests)
        except EOFError:
            return
        _write(answers, _in_a_fork(partial(_compile, tokenizer, str(grammar)), cpu_seconds))


def _compile(tokenizer: Any, grammar: str) -> str:
    """All that is done with a grammar before its first token."""
    matcher = new_matcher(tokenizer, grammar)
    error = problem_of(matcher)
    if not error:
        matcher.compute_bitmask()
        matcher.deep_copy()
        error = problem_of(matcher)
    return error


def _in_a_fork(work: Callable[[], str], cpu_seconds: int) -> tuple[str, int]:
    """The fields of a `Verdict`: classes of this module have another name here."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _limit(cpu_seconds)
            _on_a_small_stack(work, writing)
        finally:
            os._exit(0)
    os.close(writing)
    clock = MonotonicClock()
    ended = clock.now() + cpu_seconds * PATIENCE
    said = b""
    with os.fdopen(reading, "rb") as pipe:
        while select.select([pipe], [], [], max(0.0, ended - clock.now()))[0]:
            more = os.read(pipe.fileno(), 65536)
            if not more:
                break
            said += more
        else:
            os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    num_bytes = max(0, usage.ru_maxrss - before) * unit
    if os.WIFSIGNALED(status):
        return _cause(os.WTERMSIG(status), cpu_seconds), num_bytes
    if not said.startswith(DONE):
        return f"it took more than {MEMORY_BYTES >> 20} MiB to compile", num_bytes
    return said.removeprefix(DONE).decode(errors="replace"), num_bytes


def _cause(number: int, cpu_seconds: int) -> str:
    if number in (signal.SIGKILL, signal.SIGXCPU):
        return f"it took longer than {cpu_seconds} s to compile"
    if number == signal.SIGABRT:
        return f"it took more than {MEMORY_BYTES >> 20} MiB to compile, or nests too deeply"
    return f"it is too large, nests too deeply, or its rules refer to each other in too long a chain ({signal.Signals(number).name})"


def _limit(cpu_seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:  # else: bounded by time alone
        size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))


def _on_a_small_stack(work: Callable[[], str], writing: int) -> None:
    def run() -> None:
        try:
            error = work()
        except MemoryError:
            error = f"it took more than {MEMORY_BYTES >> 20} MiB to compile"
        except BaseException as failure:  # a panic of the grammar engine is a BaseException
            error = f"the grammar engine failed: {failure}"
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(DONE + error.encode(errors="replace"))

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()

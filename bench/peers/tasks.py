"""What every engine is asked for: five tasks, of the workloads that everything else is measured with.

Must not know: engines, what is claimed of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.bench.work import Work
from octavo.bench.workloads import make_work

AGAIN = ", again"
UNIFORM = 15 / 17 + 1e-4  # of 136: 16 to 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to do. `again`: it is asked twice in a row, and what was cached of the first time serves the second."""

    name: str
    work: Work
    usual: Mapping[str, float]  # seconds of an engine on two cores of an EPYC (Zen 4), to say beforehand how long a run takes about
    again: bool = False

    @property
    def timings(self) -> list[str]:
        """Names of what is timed in one turn."""
        return [self.name, self.name + AGAIN] if self.again else [self.name]

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids."""
        return [list(item.prompt) for item in self.work.items]

    @property
    def lengths(self) -> list[int]:
        """Output tokens of each."""
        return [item.output_len for item in self.work.items]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(item.prompt) + item.output_len for item in self.work.items)


def make_tasks(vocab_size: int, *, seed: int = 0, scale: float = 1.0) -> dict[str, Task]:
    """By name. `scale` shrinks all counts and lengths, to try out a run: the figures mean nothing then."""

    def scaled(number: int) -> int:
        return max(1, round(number * scale))

    def work(workload: str, count: int, **options: float) -> Work:
        return make_work(workload, count=scaled(count), vocab_size=vocab_size, seed=seed, options=options)

    def usual(seconds: dict[str, float]) -> dict[str, float]:
        return {name: scale * number for name, number in seconds.items()}

    tasks = (
        Task(
            name="mixed",
            work=work("random", 64, input_len=scaled(136), output_len=scaled(136), range_ratio=UNIFORM),
            usual=usual({"Octavo": 14, "vLLM": 20, "Hugging Face": 67}),
        ),
        Task(
            name="eight", work=work("random", 8, input_len=scaled(128), output_len=scaled(128)), usual=usual({"Octavo": 1.8, "vLLM": 3.3})
        ),
        Task(
            name="one",
            work=work("random", 1, input_len=scaled(16), output_len=scaled(128)),
            usual=usual({"Octavo": 1, "vLLM": 2.3, "llama.cpp": 1.4, "Octavo int8": 0.9, "Octavo int4": 0.8}),
        ),
        Task(name="prompt", work=work("random", 1, input_len=scaled(4000), output_len=1), usual=usual({"Octavo": 3.6, "vLLM": 5.7})),
        Task(
            name="prefix",
            work=work("shared-prefix", 64, num_prefixes=1, prefix_len=scaled(512), suffix_len=scaled(32), output_len=scaled(32)),
            usual=usual({"Octavo": 6.5, "vLLM": 9.5}),
            again=True,
        ),
    )
    return {task.name: task for task in tasks}

"""The sampler's time of a step, and its share of a decode step. `python -m octavo.bench.sampler`.

SmolLM2 answers 64 prompts, and a logits processor keeps the logits of one of its steps: how flat real logits are decides how many tokens
a filter must look at. From these the sampler draws at 1, 8 and 64 rows, from a plan's chunks to token ids on the host. Then the same
prompts run at 64 rows through the engine. Cases take turns; printed are medians and quartiles in milliseconds of wall time, and the
share: the sampler's median over that of whole steps with the same settings. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from octavo.core.plan import Chunk
from octavo.core.processor import cpu_name
from octavo.core.request import Request
from octavo.core.row_requests import row_requests
from octavo.core.sampler import Sampler
from octavo.core.sampling_params import SamplingParams
from octavo.core.sampling_rows import SamplingRows
from octavo.llm import LLM

ROWS = (1, 8, 64)
OUTPUT_LEN = 40  # tokens before the step whose logits are kept
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-p and penalties": {
        "temperature": 1.0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
}
SUBJECTS = (
    "the sea",
    "a lonely robot",
    "how bread is made",
    "the history of Rome",
    "my grandmother",
    "quantum physics",
    "a dragon",
    "cooking pasta",
    "football",
    "the stock market",
    "programming in Python",
    "winter",
    "music",
    "a detective",
    "gardening",
    "space travel",
)
FORMS = (
    "Write a story about {}.",
    "Tell me about {}.",
    "Question: what is interesting about {}?\nAnswer:",
    "Once upon a time, there was {}",
)
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]

Answers = list[tuple[tuple[int, ...], list[int]]]
"""Prompt and output ids."""


def machine() -> str:
    """The processor, how many threads torch uses, and versions."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"


def real_logits(llm: LLM) -> tuple[torch.Tensor, Answers]:
    """Logits [64, V] of a step at temperature 1, and what came before."""
    kept: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    def keep(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == OUTPUT_LEN:
            kept[tuple(prompt)] = output, logits.clone()
        return logits

    llm.generate(PROMPTS, SamplingParams(max_tokens=OUTPUT_LEN + 1, ignore_eos=True, seed=0, logits_processors=(keep,)), use_tqdm=False)
    return torch.stack([logits for _, logits in kept.values()]), [(prompt, output) for prompt, (output, _) in kept.items()]


def decoding(answers: Answers, params: dict[str, Any]) -> list[Chunk]:
    """Each sequence's next step, as a scheduler plans it."""
    chunks: list[Chunk] = []
    for number, (prompt, output) in enumerate(answers):
        request = Request(str(number), prompt, SamplingParams(**params), max_tokens=OUTPUT_LEN + 1, seed=number)
        (sequence,) = request.sequences
        sequence.output = output
        last = sequence.num_tokens - 1
        chunks.append(Chunk(sequence, last, 1, last, True, (), 0))
    return chunks


@torch.inference_mode()
def sample(sampler: Sampler, chunks: list[Chunk], logits: torch.Tensor) -> float:
    """Seconds from a plan's chunks and logits to ids."""
    logits = logits.clone()  # the sampler writes into it, and a model's logits, too, were written just before
    begun = time.perf_counter()
    sampler.sample(logits, SamplingRows.build(row_requests(chunks))).token_ids.tolist()
    return time.perf_counter() - begun


def decode(llm: LLM, params: dict[str, Any], steps: int) -> list[float]:
    """Seconds of the engine's steps in which all prompts decode."""
    made = SamplingParams(max_tokens=steps + 1, ignore_eos=True, **params)
    engine = llm.engine
    requests = [engine.add_request(llm.built.loaded.tokenizer.encode(prompt), made) for prompt in PROMPTS if llm.built.loaded.tokenizer]
    times: list[float] = []
    while engine.has_work:
        ready = all(request.first_token is not None for request in requests)
        begun = time.perf_counter()
        engine.step()
        if ready and len(engine.requests) == len(requests):
            times.append(time.perf_counter() - begun)
    return times


def show(seconds: Sequence[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = (value * 1e3 for value in statistics.quantiles(seconds, n=4))
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.sampler", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=40, help="of the sampler alone")
    parser.add_argument("--passes", type=int, default=3, help="of the engine")
    parser.add_argument("--steps", type=int, default=10, help="of the engine in a pass")
    args = parser.parse_args(argv)
    llm = LLM(args.model, max_num_seqs=len(PROMPTS), max_model_len=512, num_kv_slots=16_384)
    with llm:
        logits, answers = real_logits(llm)
        chunks = {case: decoding(answers, params) for case, params in CASES.items()}
        sampler = Sampler()
        drawn: dict[tuple[str, int], list[float]] = {(case, rows): [] for case in CASES for rows in ROWS}
        stepped: dict[str, list[float]] = {case: [] for case in CASES}
        for number in range(args.passes):
            for _ in range(-(-args.rounds // args.passes)):
                for (case, rows), seconds in drawn.items():
                    seconds.append(sample(sampler, chunks[case][:rows], logits[:rows]))
            for case, params in list(CASES.items())[:: 1 if number % 2 == 0 else -1]:
                stepped[case] += decode(llm, params, args.steps)
    print(f"{machine()}; {args.model}, {logits.shape[1]:,} logits a row; milliseconds: median [quartiles]")
    print(f"{'':22}" + "".join(f"{f'{rows} rows':>22}" for rows in ROWS) + f"{'step of 64 rows':>26}{'share':>8}")
    for case in CASES:
        cells = "".join(f"{show(drawn[case, rows]):>22}" for rows in ROWS)
        share = statistics.median(drawn[case, ROWS[-1]]) / statistics.median(stepped[case])
        print(f"{case:22}{cells}{show(stepped[case]):>26}{share:>8.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

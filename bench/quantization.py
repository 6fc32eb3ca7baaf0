"""Weight-only int8 and int4 against whole weights: quality, memory, speed. `python -m octavo.bench.quantization --text FILE`.

Quality is measured with the text given, in windows: perplexity of each token after those before it, and at how many positions the likeliest
token is the one that fp32 finds. Speed is that of requests in the engine, scheduler and sampling included, each variant in turn; ratios
are medians of the rounds' pairs, with their range. A printed benchmark and no test: speeds depend on the machine.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

from octavo.bench.whole_files import write_whole
from octavo.core.processor import cpu_name
from octavo.core.sampling_params import SamplingParams
from octavo.core.text.tokenizer import Tokenizer
from octavo.llm import LLM

WINDOW = 511  # tokens, each with no more context than its window has before it
PROMPT_LEN = 16
VARIANTS = {"whole": None, "int8": "int8", "int4": "int4"}
TITLE = "# Weights of 8 and 4 bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of a model on a text."""

    nll: float  # negative log likelihood a token, in nats
    best: list[int]  # the likeliest token at each scored position

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    def agreement(self, other: Quality) -> float:
        """Share of positions at which the other finds the same token likeliest."""
        return sum(a == b for a, b in zip(self.best, other.best, strict=True)) / len(self.best)


def windows_of(ids: Sequence[int], size: int = WINDOW) -> list[list[int]]:
    """The text in pieces of `size` tokens; a last one of a single token has nothing to score and is left out."""
    pieces = [list(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


def quality(llm: LLM, windows: Sequence[Sequence[int]]) -> Quality:
    """By the engine's own log probabilities of prompts."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": list(window)} for window in windows], params, use_tqdm=False)
    entries = [
        (entry, token)
        for output in outputs
        for entry, token in zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=True)
        if entry is not None
    ]
    return Quality(
        nll=-statistics.fmean(entry[token].logprob for entry, token in entries),
        best=[min(entry, key=lambda token: (entry[token].rank, token)) for entry, _ in entries],
    )


def open_variant(model: str, quantization: str | None, dtype: str, *, max_num_seqs: int = 64, ops: str = "auto") -> LLM:
    """An engine on the CPU; without a prefix cache, so that repeats compute what they ask for."""
    plugin = {"plugin": "llama"} | ({} if quantization is None else {"quantization": quantization})
    return LLM(
        model=model,
        model_plugin=plugin,
        dtype=dtype,
        device="cpu",
        ops=ops,
        allocator="paged",
        max_model_len=WINDOW + 1,
        max_num_seqs=max_num_seqs,
        num_kv_slots=64 * (WINDOW + 1),
    )


def speeds(llms: Mapping[str, LLM], rows: int, *, new_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Output tokens a second of `rows` requests at once, each variant in each round, in turned order; a first one is not counted."""
    vocabulary = min(llm.built.loaded.shape.vocab_size for llm in llms.values())
    prompts = [{"prompt_token_ids": [(5407 * row + 31 * i) % vocabulary for i in range(PROMPT_LEN)]} for row in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    found: dict[str, list[float]] = {name: [] for name in llms}
    for number in range(rounds + 1):
        for name in list(llms) if number % 2 else list(llms)[::-1]:
            begun = time.perf_counter()
            llms[name].generate(prompts, params, use_tqdm=False)
            if number:
                found[name].append(rows * new_tokens / (time.perf_counter() - begun))
    return found


def quality_table(found: Mapping[str, Quality], num_bytes: Mapping[str, int]) -> list[str]:
    """Markdown; the first is what the others are compared with."""
    reference = next(iter(found.values()))
    lines = ["| weights | MiB | perplexity | NLL a token | same likeliest token as fp32 |", "|---|---|---|---|---|"]
    return lines + [
        f"| {name} | {num_bytes[name] / 2**20:.1f} | {each.perplexity:.3f} | {each.nll:.4f} | {each.agreement(reference):.1%} |"
        for name, each in found.items()
    ]


def speed_table(found: Mapping[int, Mapping[str, Sequence[float]]]) -> list[str]:
    """Markdown: tokens a second by number of rows, and ratios to whole weights."""
    names = list(next(iter(found.values())))
    lines = ["| requests at once | " + " | ".join([*names, *(f"{name} : {names[0]}" for name in names[1:])]) + " |"]
    lines.append("|---" * (2 * len(names)) + "|")
    for rows, by_name in found.items():
        cells = [f"{statistics.median(by_name[name]):.1f}" for name in names]
        for name in names[1:]:
            ratios = [new / old for new, old in zip(by_name[name], by_name[names[0]], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables, and write them where `--out` says."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.quantization", description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="what quality is measured with: tests/quality/prose.txt, or your own")
    parser.add_argument("--model", default="smollm2-135m", help="a model of the llama plugin (default: smollm2-135m)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of activations and whole weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="requests at once (default: 1 8 64)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each request (default: 64)")
    parser.add_argument("--rounds", type=int, default=7, help="of alternation (default: 7)")
    parser.add_argument("--note", default="", help="a sentence about this run, for the page")
    parser.add_argument("--out", type=Path, help="a Markdown page that is replaced, say docs/benchmarks/quantization.md")
    asked = parser.parse_args(argv)
    most = max(asked.rows)
    bars = tqdm(total=4 + len(asked.rows), unit="part", disable=None)
    with open_variant(asked.model, None, "float32") as llm:
        tokenizer = llm.built.loaded.tokenizer or Tokenizer.from_folder(llm.built.loaded.source.path)
        windows = windows_of(tokenizer.encode(asked.text.read_text(encoding="utf-8")))
        qualities, num_bytes = {"float32": quality(llm, windows)}, {"float32": llm.built.loaded.model.weight_bytes()}
    bars.update()
    llms = {}
    for name, quantization in VARIANTS.items():
        shown = name if quantization else asked.dtype
        llms[shown] = llm = open_variant(asked.model, quantization, asked.dtype, max_num_seqs=most)
        qualities[shown], num_bytes[shown] = quality(llm, windows), llm.built.loaded.model.weight_bytes()
        bars.update()
    found = {}
    for rows in asked.rows:
        found[rows] = speeds(llms, rows, new_tokens=asked.new_tokens, rounds=asked.rounds)
        bars.update()
    stack = next(iter(llms.values())).built.config.stack
    for llm in llms.values():
        llm.close()
    bars.close()
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"
    head = f"`python -m octavo.bench.quantization` of {date.today()}: {asked.model}, {stack}, activations in {asked.dtype}, on {machine}."
    scored = len(next(iter(qualities.values())).best)
    text = f"Quality: {scored} tokens of {asked.text.as_posix()}, in windows of {WINDOW}, each token after those before it in its window."
    speed = (
        f"Output tokens a second: {asked.new_tokens} tokens out after {PROMPT_LEN} in, medians of {asked.rounds} rounds in alternation; "
        "ratios are medians of the rounds' pairs, with their range."
    )
    page = [TITLE, "", head, *([asked.note] if asked.note else []), "", text, "", *quality_table(qualities, num_bytes)]
    page += ["", speed, "", *speed_table(found)]
    print("\n".join(page))
    if asked.out is not None:
        write_whole(asked.out, "\n".join(page) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
